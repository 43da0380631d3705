-- The edges of a saved circuit beside the scores that chose them.
-- $run: a saved circuit
select c.edge, e.score, e.stderr
from v_circuit_edge c
join v_run r using (run_id)
left join v_edge e on e.run_id = r.parent and e.edge = c.edge
where c.run_id = $run
order by abs(e.score) desc nulls last, c.edge
