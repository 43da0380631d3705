-- How far two runs agree: edges that both have among their first k by size of score.
-- $run_a: a run of edge scores
-- $run_b: another one
-- $k: how many edges of each = 200
with a as (
    select edge from v_edge
    where run_id = $run_a and status = 'ok' order by abs(score) desc, edge limit $k
),
b as (
    select edge from v_edge
    where run_id = $run_b and status = 'ok' order by abs(score) desc, edge limit $k
),
counts as (
    select
        (select count(*) from a) as in_a,
        (select count(*) from b) as in_b,
        (select count(*) from a semi join b using (edge)) as in_both
)
select in_a, in_b, in_both, in_both / nullif(in_a + in_b - in_both, 0) as iou
from counts
