//! Metrics of I/O: the same counters as the method `io_statistics`.

use std::collections::BTreeMap;

use tenmil_base::{IoStats, Operation};
use tenmil_wire::Status;

use super::families::{
    IO_BUSY, IO_BYTES, IO_DURATION, IO_ERRORS, IO_FAILED, IO_LIMIT_WAIT, IO_LIMITED, IO_OPERATIONS,
    IO_TIME,
};
use super::host_names::HostNames;
use super::metrics_text::MetricsText;
use crate::methods::io_statistics::{Division, RowKey, Selection, collect_io_stats};
use crate::process_parts::ProcessParts;

/// Statistics by export, namespace and host.
#[derive(Debug, Default)]
pub(super) struct IoRows(BTreeMap<RowKey, IoStats>);

/// Operations that have series before they are used, so that their rates begin at zero.
const ALWAYS_SHOWN: [Operation; 4] =
    [Operation::Read, Operation::Write, Operation::Flush, Operation::Deallocate];

impl IoRows {
    pub(super) fn collect(parts: &ProcessParts) -> Self {
        let division = Division { namespace: true, host: true, queue: false };
        Self(collect_io_stats(parts, division, Selection::default()).unwrap_or_default())
    }

    /// NQNs of the hosts.
    pub(super) fn hosts(&self) -> impl Iterator<Item = &str> {
        self.0.keys().filter_map(|key| key.host.as_deref())
    }

    pub(super) fn write(&self, hosts: &HostNames, text: &mut MetricsText) {
        for (key, stats) in &self.0 {
            let namespace = key.namespace.map(|nsid| nsid.to_string()).unwrap_or_default();
            let host = key.host.as_deref().map_or("", |host| hosts.label(host));
            let (protocol, export) = (key.protocol, key.export.as_str());
            for operation in Operation::ALL {
                let one = stats.operation_stats(operation);
                if one.count == 0 && one.errors == 0 && !ALWAYS_SHOWN.contains(&operation) {
                    continue;
                }
                let labels = [protocol, export, &namespace, host, operation.name()];
                text.add(&IO_OPERATIONS, labels, one.count);
                text.add(&IO_BYTES, labels, one.bytes);
                text.add(&IO_FAILED, labels, one.errors);
                text.add(&IO_TIME, labels, one.latency.sum());
                let labels = [protocol, export, &namespace, operation.name()];
                text.add_histogram(&IO_DURATION, labels, &one.latency);
            }
            for (status, count) in &stats.errors_by_status {
                let (number, name) = (format!("{status:#06x}"), Status(*status).name());
                let labels = [protocol, export, &namespace, host, &number, name];
                text.add(&IO_ERRORS, labels, *count);
            }
            let labels = [protocol, export, &namespace, host];
            text.add(&IO_LIMITED, labels, stats.limited);
            text.add(&IO_LIMIT_WAIT, labels, stats.limit_wait.ns);
            if protocol == "nvme-tcp" {
                text.add(&IO_BUSY, labels, stats.busy.ns);
            }
        }
    }
}
