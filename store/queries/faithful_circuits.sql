-- Evaluations that reach a faithfulness with at most so many edges, smallest first.
-- $faithfulness: at least this = 0.8
-- $edges: at most this many edges = 1000
select
    e.run_id,
    r.model,
    r.task,
    e.label,
    e.rank,
    e.ablation,
    e.n_edges,
    e.faithfulness,
    e.faithfulness_low,
    e.faithfulness_high,
    e.prompts_overlap
from v_eval e
join v_run r using (run_id)
where e.faithfulness >= $faithfulness and e.n_edges <= $edges and e.label = 'circuit'
order by e.n_edges, e.faithfulness desc, e.run_id
