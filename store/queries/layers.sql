-- Effect by layer of the sender and of the receiver: the heat map of a run. Null is
-- the input as a sender, and the logits as a receiver.
-- $run: a run of edge scores
select
    sender_layer,
    receiver_layer,
    sum(score) as total_effect,
    sum(abs(score)) as total_size,
    count(*) as edges
from v_edge
where run_id = $run and status = 'ok'
group by all
order by sender_layer nulls first, receiver_layer nulls last
