-- The sites of a read with the largest scores, either sign.
-- $run: a run of reads (ACT rows)
-- $target: only this target = null
-- $k: how many sites = 20
select target_id, site, pass, position, sample_id, method, reduction, score
from v_act
where run_id = $run and status = 'ok' and (target_id = $target or $target is null)
order by abs(score) desc, target_id, address
limit $k
