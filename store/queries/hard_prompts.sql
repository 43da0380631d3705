-- The prompts on which a circuit loses most of the metric, worst first.
-- $run: a run of evaluations
-- $k: how many prompts = 20
select
    x.prompt,
    x.k,
    x.metric,
    x.metric_full,
    x.metric_full - x.metric as lost,
    p.clean,
    p.corrupted
from v_per_example x
join v_run r using (run_id)
left join v_prompt p
    on p.dataset_digest = r.dataset_digest and p.prompt = x.prompt
where x.run_id = $run and x.label = 'circuit'
order by lost desc, x.prompt
limit $k
