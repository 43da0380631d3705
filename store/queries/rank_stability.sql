-- How stable edges rank over the runs of a task: mean and spread of each edge's rank
-- by size of score, and the share of runs in which it is among the first k.
-- $task: the task, as in ioi
-- $model: only runs of this model = null
-- $k: what counts as the top = 100
with scored as (
    select run_id
    from v_run
    where kind = 'edge' and task = $task and (model = $model or $model is null)
),
ranked as (
    select
        e.edge,
        rank() over (partition by e.run_id order by abs(e.score) desc) as place
    from v_edge e
    semi join scored s on s.run_id = e.run_id
    where e.status = 'ok'
)
select
    edge,
    count(*) as runs,
    avg(place) as mean_rank,
    stddev_samp(place) as sd_rank,
    avg((place <= $k)::double) as share_in_top
from ranked
group by edge
having min(place) <= $k
order by mean_rank, edge
limit $k
