-- The edges of a run that help the behaviour most: largest support (minus the score,
-- sign turned where a lower metric is better).
-- $run: a run of edge scores
-- $k: how many edges = 20
select e.edge, if(r.higher_is_better, -e.score, e.score) as support, e.stderr, e.n
from v_edge e
join v_run r using (run_id)
where e.run_id = $run and r.run_id = $run and e.status = 'ok'
order by support desc, e.edge
limit $k
