-- Runs of the same computation (same parameters, model and data) with their numbers of
-- rows: repeats that came out equal have one run id.
-- $run: any run
select r.run_id, r.started_at, r.seconds, r.seed, r.row_counts, r.note
from v_run r
where r.params_digest = (select params_digest from v_run where run_id = $run)
order by r.started_at, r.run_id
