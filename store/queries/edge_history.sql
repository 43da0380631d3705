-- One edge over all runs that scored it, oldest first: over checkpoints, seeds, tasks.
-- $edge: the edge, as in m0->a1.h0<q>
-- $task: only this task = null
select
    r.started_at,
    r.model,
    r.weights_digest,
    r.task,
    r.method,
    r.seed,
    e.score,
    e.stderr,
    e.status,
    e.run_id
from v_edge e
join v_run r using (run_id)
where e.edge = $edge and (r.task = $task or $task is null)
order by r.started_at, e.run_id
