-- The faithfulness curve of an evaluation: one row a circuit size.
-- $run: a run of evaluations
select
    label,
    rank,
    k,
    n_edges,
    faithfulness,
    faithfulness_low,
    faithfulness_high,
    metric,
    kl,
    accuracy
from v_eval
where run_id = $run
order by label, rank, n_edges
