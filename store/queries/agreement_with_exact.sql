-- How well first-order scores rank edges: rank and linear correlation with the exact
-- effects.
-- $run: a run of first-order scores (EAP, EAP-IG)
-- $run_exact: a run of exact effects, on the same prompts
with pairs as (
    select
        s.score,
        x.score as exact,
        rank() over (order by s.score) as place,
        rank() over (order by x.score) as exact_place
    from v_edge x
    join v_edge s on s.edge = x.edge
    where
        s.run_id = $run
        and x.run_id = $run_exact
        and s.status = 'ok'
        and x.status = 'ok'
)
select
    count(*) as edges,
    corr(place, exact_place) as rank_correlation,
    corr(score, exact) as correlation
from pairs
