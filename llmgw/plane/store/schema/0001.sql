-- One map from paths to JSON values. A deleted key stays as a row without a value, so that
-- "what changed since" can say that it went; such rows are pruned after a while.
create table entries (
    key text primary key,
    value blob,
    revision integer not null
) without rowid;

create index entries_by_revision on entries (revision);

-- `revision`: of the last commit. `pruned`: deletions up to this revision may be missing.
create table meta (
    name text primary key,
    value integer not null
) without rowid;

insert into meta (name, value) values ('revision', 0), ('pruned', 0);
