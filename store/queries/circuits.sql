-- Saved circuits and how well they did, newest first.
-- $task: only this task = null
select
    c.run_id,
    c.circuit_id,
    c.name,
    r.model,
    r.task,
    c.selector,
    c.n_edges,
    max(e.faithfulness) as best_faithfulness
from v_circuit c
join v_run r using (run_id)
left join v_eval e on e.circuit_id = c.circuit_id and e.label = 'circuit'
where r.kind = 'circuit' and (r.task = $task or $task is null)
group by all
order by max(r.saved_at) desc, c.run_id
