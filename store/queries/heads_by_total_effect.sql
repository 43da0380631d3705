-- Attention heads by the total effect of what they write: the sum over their outgoing
-- edges is the first-order effect of corrupting the head.
-- $run: a run of edge scores
-- $k: how many heads = 20
select
    sender as head,
    sender_layer as layer,
    sum(score) as total_effect,
    sum(abs(score)) as total_size,
    count(*) as edges
from v_edge
where run_id = $run and status = 'ok' and sender like 'a%'
group by all
order by abs(total_effect) desc, head
limit $k
