# Makes the cluster with the role and the database `airflow` at the first start, then becomes the server.
set -eu
cluster=/data/15
if [ ! -d "$cluster" ]; then
    rm -rf "$cluster.partial"
    initdb --pgdata="$cluster.partial" --encoding=UTF8 --auth=reject --auth-local=peer >/dev/null
    printf 'host airflow airflow all scram-sha-256\n' >>"$cluster.partial/pg_hba.conf"
    # Nobody else reaches the loopback of this container; `reject` there would come first for it.
    sed -i '/^host .*reject$/d' "$cluster.partial/pg_hba.conf"
    postgres --single -D "$cluster.partial" postgres >/dev/null <<EOF
CREATE ROLE airflow LOGIN PASSWORD '$(cat /run/keys/password)'
CREATE DATABASE airflow OWNER airflow
EOF
    mv "$cluster.partial" "$cluster"
fi
exec postgres -D "$cluster" -c listen_addresses='*' -c unix_socket_directories=/tmp -c max_connections=200
