-- Edges without a score and why, counted by receiver: what the metric does not reach is
-- not a zero.
-- $run: a run of edge scores
select receiver, port, status, count(*) as edges
from v_edge
where run_id = $run and status <> 'ok'
group by all
order by edges desc, receiver, port
