//! Metrics of what the configuration permits: rate limits, and the number of allowed hosts.
//!
//! Only limits that are set have series.

use tenmil_base::Span;
use tenmil_block::{QosLimits, RateLimit};

use super::families::{LIMIT_BURST, LIMIT_BYTES, LIMIT_OPERATIONS, NVME_ALLOWED_HOSTS};
use super::host_names::HostNames;
use super::metrics_text::MetricsText;
use crate::methods::{NbdExports, RateLimits, TargetConfiguration};
use crate::process_parts::ProcessParts;
use crate::target_config::HostsConfig;

/// Smallest burst of the limiters.
const BURST_MIN: Span = Span::from_ms(20);

/// NQNs of the hosts that have limits of their own.
pub(super) fn hosts(parts: &ProcessParts) -> Vec<String> {
    let Ok(RateLimits(service)) = parts.find_part::<RateLimits>("rate limits") else {
        return Vec::new();
    };
    service.all_limits().into_iter().flat_map(|(_, limits)| limits.hosts.into_keys()).collect()
}

pub(super) fn collect(parts: &ProcessParts, hosts: &HostNames, text: &mut MetricsText) {
    if let Ok(RateLimits(service)) = parts.find_part::<RateLimits>("rate limits") {
        for (nqn, limits) in service.all_limits() {
            write_limits(["subsystem", &nqn, "", ""], &limits.subsystem, text);
            for (nsid, of) in &limits.namespaces {
                write_limits(["namespace", &nqn, &nsid.to_string(), ""], of, text);
            }
            write_limits(["each-host", &nqn, "", ""], &limits.each_host, text);
            // Those whose names are no labels would be one series with several values.
            for (host, of) in limits.hosts.iter().filter(|(host, _)| hosts.label(host) == *host) {
                write_limits(["host", &nqn, "", host], of, text);
            }
        }
    }
    if let Ok(exports) = parts.find_part::<NbdExports>("exports") {
        for served in exports.served() {
            write_limits(["export", served.export().name(), "", ""], &served.qos_limits(), text);
        }
    }
    let configuration = parts.find_part::<TargetConfiguration>("target that can be configured");
    let Some(served) = configuration.ok().and_then(TargetConfiguration::served) else { return };
    for subsystem in &served.config.subsystems {
        if let HostsConfig::Only(hosts) = &subsystem.hosts {
            text.add(&NVME_ALLOWED_HOSTS, [subsystem.nqn.as_str()], hosts.len() as u64);
        }
    }
}

fn write_limits(
    [of, export, namespace, host]: [&str; 4],
    limits: &QosLimits,
    text: &mut MetricsText,
) {
    if limits.is_unlimited() {
        return;
    }
    let QosLimits { total, reads, writes, burst } = limits;
    for (direction, RateLimit { iops, bytes }) in
        [("total", total), ("read", reads), ("write", writes)]
    {
        let labels = [of, export, namespace, host, direction];
        for (family, rate) in [(&LIMIT_OPERATIONS, iops), (&LIMIT_BYTES, bytes)] {
            if let Some(rate) = rate {
                text.add(family, labels, rate.get());
            }
        }
    }
    text.add(&LIMIT_BURST, [of, export, namespace, host], (*burst).max(BURST_MIN).ns);
}
