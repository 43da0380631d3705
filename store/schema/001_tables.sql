-- Runs, their rows, the prompts they ran on, and what people say about them.
--
-- Facts are integers: run_no and edge_no point into run and edge_name. There is no
-- primary key on a fact: it would cost more than twice the space, and a run is folded
-- in once, in one transaction, under its content-derived id.

create table run (
    run_no integer not null,
    run_id varchar not null,
    kind varchar not null,
    type varchar,
    model varchar,
    architecture varchar,
    weights_digest varchar,
    dtype varchar,
    processing varchar,
    backend varchar,
    device varchar,
    n_layers integer,
    n_heads integer,
    n_kv_heads integer,
    d_model integer,
    task varchar,
    dataset_digest varchar,
    n bigint,
    metric varchar,
    higher_is_better boolean,
    method varchar,
    steps integer,
    rule varchar,
    ablation varchar,
    policy_digest varchar,
    params_digest varchar,
    seed bigint,
    parent varchar,
    started_at timestamp,
    seconds double,
    saved_at timestamp,
    circuitlab varchar,
    torch varchar,
    transformer_lens varchar,
    transformers varchar,
    numpy varchar,
    python varchar,
    git_commit varchar,
    row_counts json,
    policy json,
    provenance json,
    versions json,
    header varchar not null
);

create table edge_name (
    edge_no integer not null,
    edge varchar not null,
    sender varchar not null,
    receiver varchar not null,
    port varchar not null,
    sender_layer integer,
    receiver_layer integer
);

create table edge (
    run_no integer not null,
    row integer not null,
    edge_no integer not null,
    position integer,
    sample_id varchar,
    score double,
    stderr double,
    n bigint,
    status varchar
);

create table site (
    site_no integer not null,
    site_key varchar not null
);

create table act (
    run_no integer not null,
    row integer not null,
    site_no integer,
    target_id varchar,
    kind varchar,
    address varchar,
    site varchar,
    pass integer,
    position integer,
    element varchar,
    sample_id varchar,
    alias_group varchar,
    method varchar,
    reduction varchar,
    grain varchar,
    score double,
    stderr double,
    n bigint,
    shape varchar,
    dtype varchar,
    device varchar,
    status varchar,
    status_reason varchar,
    differentiable boolean,
    retention varchar,
    capture_status varchar,
    resolution varchar,
    frozen_requested bigint,
    frozen_resolved bigint,
    frozen_reached bigint,
    policy_digest varchar,
    detached boolean,
    rescorable boolean,
    more varchar
);

create table eval (
    run_no integer not null,
    row integer not null,
    circuit_id varchar,
    label varchar,
    rank varchar,
    ablation varchar,
    metric_name varchar,
    k bigint,
    n_edges bigint,
    n bigint,
    faithfulness double,
    faithfulness_low double,
    faithfulness_high double,
    completeness double,
    metric double,
    metric_full double,
    metric_ablated double,
    kl double,
    accuracy double,
    prompts_overlap boolean,
    more varchar
);

create table per_example (
    run_no integer not null,
    row integer not null,
    circuit_id varchar,
    label varchar,
    k bigint,
    prompt integer,
    metric double,
    metric_full double,
    metric_ablated double,
    kl double,
    more varchar
);

create table circuit (
    run_no integer not null,
    row integer not null,
    circuit_id varchar,
    name varchar,
    n_edges bigint,
    selector varchar,
    provenance varchar
);

create table circuit_edge (
    run_no integer not null,
    row integer not null,
    edge_no integer not null
);

create table dataset (
    dataset_no integer not null,
    dataset_digest varchar not null,
    name varchar,
    n bigint,
    seed bigint,
    prepend_bos boolean,
    tokenizer varchar,
    header varchar not null,
    saved_at timestamp
);

create table prompt (
    dataset_no integer not null,
    prompt integer,
    clean varchar,
    corrupted varchar,
    clean_tokens integer[],
    corrupted_tokens integer[],
    answers integer[][],
    wrong_answers integer[][],
    answer_texts varchar[],
    wrong_answer_texts varchar[],
    clean_token_texts varchar[],
    corrupted_token_texts varchar[]
);

-- Notes, tags and tombstones: what was said, when. The latest word counts.
create table event (
    event_id varchar not null,
    said_at timestamp not null,
    run_id varchar not null,
    kind varchar not null,
    value varchar
);

-- The readable form. Deleted runs (hidden) are in no view but v_tombstone.

create or replace view hidden as
select run_id
from event
where kind in ('delete', 'restore')
group by run_id
having arg_max(kind, said_at) = 'delete';

create or replace view live as
select run_no, run_id from run anti join hidden using (run_id);

create or replace view v_tombstone as
select run_id, max(said_at) as deleted_at
from event semi join hidden using (run_id)
where kind = 'delete'
group by run_id;

create or replace view v_tag as
select run_id, value as tag, max(said_at) as said_at
from event
where kind in ('tag', 'untag')
group by run_id, value
having arg_max(kind, said_at) = 'tag';

create or replace view v_note as
select run_id, value as note, said_at from event where kind = 'note';

create or replace view v_run as
select
    r.* exclude (run_no, header),
    coalesce(t.tags, []) as tags,
    n.note
from run r
anti join hidden h on h.run_id = r.run_id
left join (
    select run_id, list(tag order by tag) as tags from v_tag group by run_id
) t on t.run_id = r.run_id
left join (
    select run_id, arg_max(note, said_at) as note from v_note group by run_id
) n on n.run_id = r.run_id;

create or replace view v_edge as
select
    r.run_id,
    d.edge,
    d.sender,
    d.receiver,
    d.port,
    d.sender_layer,
    d.receiver_layer,
    e.position,
    e.sample_id,
    e.score,
    e.stderr,
    e.n,
    e.status
from edge e
join live r using (run_no)
join edge_name d using (edge_no);

create or replace view v_act as
select r.run_id, s.site_key, a.* exclude (run_no, row, site_no)
from act a
join live r using (run_no)
left join site s using (site_no);

create or replace view v_eval as
select r.run_id, e.* exclude (run_no, row)
from eval e join live r using (run_no);

create or replace view v_per_example as
select r.run_id, e.* exclude (run_no, row)
from per_example e join live r using (run_no);

create or replace view v_circuit as
select r.run_id, c.* exclude (run_no, row)
from circuit c join live r using (run_no);

create or replace view v_circuit_edge as
select
    r.run_id,
    d.edge,
    d.sender,
    d.receiver,
    d.port,
    d.sender_layer,
    d.receiver_layer
from circuit_edge c
join live r using (run_no)
join edge_name d using (edge_no);

create or replace view v_dataset as
select * exclude (dataset_no, header) from dataset;

create or replace view v_prompt as
select d.dataset_digest, p.* exclude (dataset_no)
from prompt p join dataset d using (dataset_no);
