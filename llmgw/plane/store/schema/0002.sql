-- Which releases of llmgw have opened this file, with the version of the schema that each knew, and when each did so
-- first: a release that must refuse the file can name the one it takes.
create table releases (
    release text primary key,
    schema integer not null,
    clock real not null
) without rowid;
