-- Runs, rows and compute time by model, task and method.
select
    kind,
    model,
    task,
    method,
    count(*) as runs,
    sum(seconds) as seconds,
    max(saved_at) as last_saved
from v_run
group by all
order by seconds desc, kind, model, task, method
