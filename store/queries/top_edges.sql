-- The edges of a run with the largest scores, either sign.
-- $run: a run of edge scores
-- $k: how many edges = 20
select edge, score, stderr, n
from v_edge
where run_id = $run and status = 'ok'
order by abs(score) desc, edge
limit $k
