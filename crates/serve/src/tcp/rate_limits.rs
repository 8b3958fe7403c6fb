//! Rate limits of an exported subsystem: of the subsystem, of its namespaces and of its hosts.
//!
//! ```text
//!   subsystem ──────────┐
//!   host, by its NQN ───┼──▶ RateGate of a connection, one for each namespace with limits ─▶ CommandTable
//!   namespace ──────────┘
//! ```
//!
//! The limits of a host are shared by all its connections, on whatever reactors they are.

use std::collections::BTreeMap;

use tenmil_base::Instant;
use tenmil_block::{QosLimiter, QosLimits};

/// Rate limits of an exported subsystem. The lowest of those that concern a command applies.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExportLimits {
    /// Limits of all hosts and namespaces together.
    pub subsystem: QosLimits,
    /// By namespace identifier: limits of all hosts together.
    pub namespaces: BTreeMap<u32, QosLimits>,
    /// By host NQN: limits of all its connections together.
    pub hosts: BTreeMap<String, QosLimits>,
    /// Limits of each host that has none in `hosts`. Hosts without an NQN share one.
    pub each_host: QosLimits,
}

/// The limiters of an export.
#[derive(Debug, Default)]
pub(super) struct ExportLimiters {
    limits: ExportLimits,
    /// Number of changes.
    generation: u64,
    subsystem: Option<QosLimiter>,
    namespaces: BTreeMap<u32, QosLimiter>,
    /// Those of the hosts that have connected.
    hosts: BTreeMap<String, QosLimiter>,
}

/// The limiters that concern a connection.
#[derive(Clone, Debug, Default)]
pub(super) struct ConnectionLimiters {
    /// Value of the export's `generation`.
    pub(super) generation: u64,
    /// Limiters of every command.
    pub(super) all: Vec<QosLimiter>,
    /// Further ones by namespace identifier.
    pub(super) namespaces: BTreeMap<u32, QosLimiter>,
}

/// Number of hosts whose limiters are kept while they are not connected.
const IDLE_HOSTS_MAX: usize = 1024;

impl ExportLimits {
    fn of_host(&self, host: &str) -> QosLimits {
        self.hosts.get(host).copied().unwrap_or(self.each_host)
    }
}

impl ExportLimiters {
    pub(super) fn limits(&self) -> &ExportLimits {
        &self.limits
    }

    /// Changes the limits: what has been used under the old ones counts against the new ones. Returns
    /// whether anything changed; then every queue must fetch its limiters again.
    pub(super) fn set(&mut self, now: Instant, limits: ExportLimits) -> bool {
        if self.limits == limits {
            return false;
        }
        self.generation += 1;
        let subsystem = self.subsystem.take();
        self.subsystem = changed_limiter(now, subsystem, limits.subsystem);
        let mut namespaces = std::mem::take(&mut self.namespaces);
        for (nsid, limiter) in &namespaces {
            if !limits.namespaces.contains_key(nsid) {
                limiter.set(now, QosLimits::default());
            }
        }
        for (nsid, new) in &limits.namespaces {
            let limiter = changed_limiter(now, namespaces.remove(nsid), *new);
            self.namespaces.extend(limiter.map(|limiter| (*nsid, limiter)));
        }
        self.hosts.retain(|host, limiter| {
            let new = limits.of_host(host);
            limiter.set(now, new);
            !new.is_unlimited()
        });
        self.limits = limits;
        true
    }

    /// Whether the limiters of a generation are outdated.
    pub(super) fn is_newer_than(&self, generation: u64) -> bool {
        self.generation != generation
    }

    /// The limiters of a connection of this host.
    pub(super) fn of_connection(&mut self, host: &str) -> ConnectionLimiters {
        let mut all: Vec<QosLimiter> = self.subsystem.iter().cloned().collect();
        let limits = self.limits.of_host(host);
        if !limits.is_unlimited() {
            if self.hosts.len() >= IDLE_HOSTS_MAX {
                self.hosts.retain(|_, limiter| limiter.is_in_use());
            }
            let limiter = self.hosts.entry(host.to_owned());
            all.push(limiter.or_insert_with(|| QosLimiter::new(limits)).clone());
        }
        ConnectionLimiters { generation: self.generation, all, namespaces: self.namespaces.clone() }
    }
}

impl ConnectionLimiters {
    /// Whether no command is limited.
    pub(super) fn is_unlimited(&self) -> bool {
        self.all.is_empty() && self.namespaces.is_empty()
    }
}

/// The limiter with new limits, or `None` if they limit nothing: then the old one lets everything pass.
fn changed_limiter(
    now: Instant,
    limiter: Option<QosLimiter>,
    limits: QosLimits,
) -> Option<QosLimiter> {
    match limiter {
        Some(limiter) => {
            limiter.set(now, limits);
            (!limits.is_unlimited()).then_some(limiter)
        }
        None => (!limits.is_unlimited()).then(|| QosLimiter::new(limits)),
    }
}
