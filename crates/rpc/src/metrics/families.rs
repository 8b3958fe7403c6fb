//! Table of all metrics. Names, labels and units are stable: metrics may be added, but none is changed.
//! `docs/operator/metrics.md` lists them, and the tests compare both.

use super::metrics_text::{Family, MetricKind, Unit};

const fn counter(
    name: &'static str,
    unit: Unit,
    labels: &'static [&'static str],
    help: &'static str,
) -> Family {
    Family { name, kind: MetricKind::Counter, unit, help, labels }
}

const fn gauge(
    name: &'static str,
    unit: Unit,
    labels: &'static [&'static str],
    help: &'static str,
) -> Family {
    Family { name, kind: MetricKind::Gauge, unit, help, labels }
}

macro_rules! families {
    ($($name:ident = $family:expr;)*) => {
        $(pub(super) static $name: Family = $family;)*

        /// All metrics, in the order of the documentation.
        #[cfg(test)]
        pub(super) static ALL: &[&Family] = &[$(&$name),*];
    };
}

const ROW: &[&str] = &["protocol", "export", "namespace", "host", "operation"];
const ROW_WITHOUT_OPERATION: &[&str] = &["protocol", "export", "namespace", "host"];
const LIMIT: &[&str] = &["of", "export", "namespace", "host", "direction"];
const LIMITED: &[&str] = &["of", "export", "namespace", "host"];

families! {
    BUILD = Family {
        name: "tenmil_build",
        kind: MetricKind::Info,
        unit: Unit::None,
        help: "Version of the program",
        labels: &["version"],
    };
    START_TIME = gauge("process_start_time_seconds", Unit::Seconds, &[], "Time of the start of the process since 1970");
    CPU_TIME = counter("process_cpu_seconds", Unit::Seconds, &[], "CPU time of all threads");
    RESIDENT = gauge("process_resident_memory_bytes", Unit::Bytes, &[], "Resident memory");
    DESCRIPTORS = gauge("process_open_fds", Unit::None, &[], "Open file descriptors");
    THREADS = gauge("process_threads", Unit::None, &[], "Threads of the operating system");
    LOG_LINES = counter("tenmil_log_lines", Unit::None, &["result"], "Log lines that were written, suppressed by a rate limit, or dropped");
    OTLP_REQUESTS = counter("tenmil_otlp_requests", Unit::None, &["signal", "result"], "Requests to the OpenTelemetry collector that it accepted, or that failed");
    OTLP_DROPPED_SPANS = counter("tenmil_otlp_dropped_spans", Unit::None, &[], "Spans that the OpenTelemetry collector did not accept in time");

    IO_OPERATIONS = counter("tenmil_io_operations", Unit::None, ROW, "Successful commands of hosts and clients");
    IO_BYTES = counter("tenmil_io_bytes", Unit::Bytes, ROW, "Bytes transferred by successful commands");
    IO_FAILED = counter("tenmil_io_failed_operations", Unit::None, ROW, "Failed commands");
    IO_ERRORS = counter(
        "tenmil_io_errors",
        Unit::None,
        &["protocol", "export", "namespace", "host", "status", "status_name"],
        "Failed commands by their NVMe status",
    );
    IO_DURATION = Family {
        name: "tenmil_io_duration_seconds",
        kind: MetricKind::Histogram,
        unit: Unit::Seconds,
        help: "Latency of successful commands at the server, of all hosts together",
        labels: &["protocol", "export", "namespace", "operation"],
    };
    IO_TIME = counter("tenmil_io_time_seconds", Unit::Seconds, ROW, "Sum of the latencies of successful commands");
    IO_BUSY = counter("tenmil_io_busy_seconds", Unit::Seconds, ROW_WITHOUT_OPERATION, "Time with commands in flight, of the queue for which it is longest; NVMe/TCP only");
    IO_LIMITED = counter("tenmil_io_limited_operations", Unit::None, ROW_WITHOUT_OPERATION, "Commands that waited for a rate limit");
    IO_LIMIT_WAIT = counter("tenmil_io_limit_wait_seconds", Unit::Seconds, ROW_WITHOUT_OPERATION, "Sum of the times that commands waited for a rate limit, which are not part of their latency");
    LIMIT_OPERATIONS = gauge("tenmil_limit_operations_per_second", Unit::None, LIMIT, "Rate limit of commands per second of a subsystem, namespace, host or export");
    LIMIT_BYTES = gauge("tenmil_limit_bytes_per_second", Unit::None, LIMIT, "Rate limit of bytes per second of a subsystem, namespace, host or export");
    LIMIT_BURST = gauge("tenmil_limit_burst_seconds", Unit::Seconds, LIMITED, "Time for which unused rate limits accumulate");

    CONNECTIONS = gauge("tenmil_connections", Unit::None, &["protocol", "export", "host"], "Open connections of hosts and clients");
    CONNECTIONS_ACCEPTED = counter("tenmil_connections_accepted", Unit::None, &["protocol", "export"], "Accepted connections");
    IO_IN_FLIGHT = gauge("tenmil_io_in_flight", Unit::None, &["protocol", "export"], "Outstanding requests of all clients; NBD only");
    NVME_QUEUES = gauge("tenmil_nvme_queues", Unit::None, &["tls", "authenticated"], "Connected queues, by TLS and by DH-HMAC-CHAP authentication of the host");
    NVME_ALLOWED_HOSTS = gauge("tenmil_nvme_allowed_hosts", Unit::None, &["export"], "Hosts that a subsystem lists as allowed to connect; none if any host may");
    NVME_ASSOCIATIONS = gauge("tenmil_nvme_associations", Unit::None, &[], "Associations of hosts with subsystems");
    NVME_ASSOCIATIONS_OPENED = counter("tenmil_nvme_associations_opened", Unit::None, &[], "Associations since the start");
    NVME_DISCONNECTS = counter("tenmil_nvme_disconnects", Unit::None, &["reason"], "Ended connections by reason");
    NVME_REFUSALS = counter("tenmil_nvme_refusals", Unit::None, &["reason"], "Rejected connections, Connect commands and authentications by reason");
    NVME_AUTHENTICATIONS = counter("tenmil_nvme_authentications", Unit::None, &["kind"], "Successful authentications: of queues that were connected, and again of connected ones");
    NVME_ABANDONED = counter("tenmil_nvme_abandoned_commands", Unit::None, &[], "Commands whose connection ended before their device completed them");
    NVME_MEMORY = gauge("tenmil_nvme_buffer_memory_bytes", Unit::Bytes, &["state"], "Buffer memory that connections hold, in use or cached, and the rest");

    REACTOR_BUSY = counter("tenmil_reactor_busy_seconds", Unit::Seconds, &["reactor"], "Time in iterations that did work");
    REACTOR_IDLE = counter("tenmil_reactor_idle_seconds", Unit::Seconds, &["reactor"], "Remaining time, sleeping or not");
    REACTOR_ITERATIONS = counter("tenmil_reactor_iterations", Unit::None, &["reactor"], "Iterations");
    REACTOR_LONG_ITERATIONS = counter("tenmil_reactor_long_iterations", Unit::None, &["reactor"], "Iterations that exceeded the time limit");
    REACTOR_LONGEST = gauge("tenmil_reactor_longest_iteration_seconds", Unit::Seconds, &["reactor"], "Longest iteration since the start");
    REACTOR_SLEEPS = counter("tenmil_reactor_sleeps", Unit::None, &["reactor"], "Times that a reactor went to sleep");
    REACTOR_WAKEUPS = counter("tenmil_reactor_wakeups", Unit::None, &["reactor"], "Wake-ups by other threads and descriptors");
    REACTOR_MESSAGES = counter("tenmil_reactor_messages", Unit::None, &["reactor"], "Messages executed");
    REACTOR_THREADS = gauge("tenmil_reactor_threads", Unit::None, &["reactor"], "Light threads on the reactor");

    EXPORT_SIZE = gauge("tenmil_export_size_bytes", Unit::Bytes, &["protocol", "export"], "Size of an NBD export");
    POOL_SIZE = gauge("tenmil_pool_size_bytes", Unit::Bytes, &["pool"], "Size of an open pool");
    POOL_USED = gauge("tenmil_pool_used_bytes", Unit::Bytes, &["pool"], "Space used by data and metadata as of the last commit");
    POOL_FREE = gauge("tenmil_pool_free_bytes", Unit::Bytes, &["pool"], "Space that can be allocated now");
    POOL_RESERVED = gauge("tenmil_pool_reserved_bytes", Unit::Bytes, &["pool"], "Free space reserved for deletions, commits and thick volumes");
    POOL_PROVISIONED = gauge("tenmil_pool_provisioned_bytes", Unit::Bytes, &["pool"], "Sum of the sizes of all writable volumes");
    POOL_VOLUMES = gauge("tenmil_pool_volumes", Unit::None, &["pool"], "Volumes and snapshots");
    POOL_STOPPED = gauge("tenmil_pool_stopped", Unit::None, &["pool"], "1 if the pool accepts no changes, else 0");
    POOL_WRITE_LOSSES = counter("tenmil_pool_write_losses", Unit::None, &["pool"], "Device failures with unflushed writes");
    VOLUME_SIZE = gauge("tenmil_volume_size_bytes", Unit::Bytes, &["pool", "volume"], "Size of a writable volume");
    VOLUME_USED = gauge("tenmil_volume_used_bytes", Unit::Bytes, &["pool", "volume"], "Allocated space of a writable volume: written and not trimmed");
    STORAGE_AGE = gauge("tenmil_storage_sample_age_seconds", Unit::Seconds, &[], "Age of the values of pools, volumes and mirrors");

    MIRROR_LEGS = gauge("tenmil_mirror_legs", Unit::None, &["device", "state"], "Legs of a mirror by state");
    MIRROR_HEALTH = gauge("tenmil_mirror_health", Unit::None, &["device", "state"], "1 for the health of the mirror, 0 for the other states");
    MIRROR_DIRTY = gauge("tenmil_mirror_dirty_bytes", Unit::Bytes, &["device"], "Size of the regions in which the legs may differ");
    MIRROR_LEFT = gauge("tenmil_mirror_resync_remaining_bytes", Unit::Bytes, &["device"], "Size of the regions still to be copied");
    MIRROR_LEGS_LOST = counter("tenmil_mirror_legs_lost", Unit::None, &["device"], "Legs that failed since the mirror was opened");
    MIRROR_LEGS_RESYNCED = counter("tenmil_mirror_legs_resynchronized", Unit::None, &["device"], "Legs that were resynchronized");
    MIRROR_WRITES_LOST = counter("tenmil_mirror_writes_lost", Unit::None, &["device"], "Times that unflushed writes were lost on all legs");

    PATH_UP = gauge("tenmil_path_up", Unit::None, &["device", "path", "address"], "1 if the path to the remote device is up, else 0");
    PATH_STATE = gauge("tenmil_path_state", Unit::None, &["device", "path", "address", "state"], "1 for the state of the path: trying, up, lost or unfit");
    PATH_ACCESS = gauge("tenmil_path_ana_state", Unit::None, &["device", "path", "address", "state"], "1 for the ANA state of a path that is up");
    PATH_PREFERRED = gauge("tenmil_path_preferred", Unit::None, &["device", "path", "address"], "1 for the preferred path, else 0");
    PATH_CONNECTS = counter("tenmil_path_connects", Unit::None, &["device", "path", "address"], "Times that the path came up");
    PATH_LOSSES = counter("tenmil_path_losses", Unit::None, &["device", "path", "address"], "Times that the path was lost");
    PATH_FAILED_CONNECTS = counter("tenmil_path_failed_connects", Unit::None, &["device", "path", "address"], "Attempts to connect the path that failed");
    PATH_FAILOVERS = counter("tenmil_path_failovers", Unit::None, &["device", "path", "address"], "Times that the path replaced another one as the preferred path");
    PATH_TIMEOUTS = counter("tenmil_path_timeouts", Unit::None, &["device", "path", "address"], "Commands that missed their deadline on the path");
    PATH_RETRIES = counter("tenmil_path_retries", Unit::None, &["device", "path", "address"], "Requests that the path has not completed and that were sent again, on it or another path");
    PATH_UNSERVED = counter("tenmil_path_unserved_requests", Unit::None, &["device"], "Requests that failed because no path to the device was usable");
}
