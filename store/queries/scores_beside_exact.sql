-- First-order scores beside the exact effect of patching each edge, best-scored first.
-- $run: a run of first-order scores (EAP, EAP-IG)
-- $run_exact: a run of exact effects, on the same prompts
-- $k: how many edges = 50
select
    s.edge,
    s.score,
    x.score as exact,
    s.score - x.score as error,
    s.stderr
from v_edge x
join v_edge s on s.edge = x.edge
where s.run_id = $run and x.run_id = $run_exact and s.status = 'ok' and x.status = 'ok'
order by abs(s.score) desc, s.edge
limit $k
