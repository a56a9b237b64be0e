# To be sourced: a Docker engine for the tests, ended with the shell that started it.
# start_engine LOG installs and starts one if none answers; stop_engine ends what it started.

engine_pid=

start_engine() {
    local log=$1 program
    for program in dockerd debootstrap; do
        command -v "$program" >/dev/null && continue
        apt-get update -qq
        apt-get install -y -qq --no-install-recommends docker.io debootstrap >/dev/null
    done
    docker info >/dev/null 2>&1 && return
    # A killed engine leaves its pid behind, and the next one refuses to start if a stranger has it now.
    if [ -f /var/run/docker.pid ] && ! grep -qs dockerd "/proc/$(cat /var/run/docker.pid)/comm"; then
        rm -f /var/run/docker.pid
    fi
    dockerd >"$log" 2>&1 &
    engine_pid=$!
    for _ in $(seq 120); do
        docker info >/dev/null 2>&1 && return
        kill -0 "$engine_pid" 2>/dev/null || break
        sleep 0.5
    done
    tail -20 "$log"
    return 1
}

stop_engine() {
    [ -n "$engine_pid" ] || return 0
    kill "$engine_pid" 2>/dev/null || true
    wait "$engine_pid" 2>/dev/null || true
    engine_pid=
}
