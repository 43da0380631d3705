-- The scores of two runs for each edge that both have, largest difference first.
-- $run_a: a run of edge scores
-- $run_b: another one
-- $k: how many edges = 50
select
    a.edge,
    a.score as score_a,
    b.score as score_b,
    b.score - a.score as difference
from v_edge a
join v_edge b on a.edge = b.edge
where a.run_id = $run_a and b.run_id = $run_b and a.status = 'ok' and b.status = 'ok'
order by abs(difference) desc, a.edge
limit $k
