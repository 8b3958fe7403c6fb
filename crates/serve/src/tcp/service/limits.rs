//! Limits of a service.

use tenmil_base::{Error, Span};
use tenmil_nvme_tcp::{ControllerConfig, SuccessFlagPolicy, Timeouts};

use crate::tcp::admission::AdmissionLimits;
use crate::tcp::injected_bugs::InjectedBugs;

/// Limits of connections and controllers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServiceLimits {
    /// Memory for the data of all connections together, in bytes.
    pub memory_bytes: u64,
    /// Largest number of connections.
    pub connections_max: usize,
    /// Entries of the longest queue: 2 to 4096.
    pub queue_entries: u16,
    /// Largest transfer of a command (MDTS) in bytes: a power of two, at least 8192.
    pub transfer_bytes_max: u32,
    /// Largest in-capsule data of an I/O command in bytes: a multiple of 16, at most 8192.
    pub in_capsule_bytes: u32,
    /// I/O queues of a controller.
    pub io_queues_max: u16,
    /// Commands of all hosts of a reactor that may execute together while one host would displace others;
    /// 0 for no restriction.
    pub fair_depth: u32,
    /// Time after its end within which an association is drained (CQT).
    pub quiesce: Span,
    /// Time that a host has to send requested data, or to receive responses.
    pub time_limit: Span,
    /// Whether header and data digests are offered.
    pub digests: bool,
    /// When a read completes without a response capsule (SUCCESS flag).
    pub success: SuccessFlagPolicy,
    /// Connection limits by origin; the default depends on the number of connections:
    /// [`AdmissionLimits::default_for`].
    pub admission: Option<AdmissionLimits>,
    #[doc(hidden)]
    pub injected_bugs: InjectedBugs,
}

impl Default for ServiceLimits {
    fn default() -> Self {
        Self {
            memory_bytes: 256 << 20,
            connections_max: 1100,
            // A host keeps one entry of its ring free, so this allows 128 outstanding commands.
            queue_entries: 129,
            transfer_bytes_max: 1 << 20,
            in_capsule_bytes: 8192,
            io_queues_max: 64,
            // Enough to keep an SSD busy, and an equal share of four commands for each of 16 hosts.
            fair_depth: 64,
            quiesce: Span::from_secs(1),
            time_limit: Span::from_secs(30),
            digests: true,
            success: SuccessFlagPolicy::WithoutFlowControl,
            admission: None,
            injected_bugs: InjectedBugs::default(),
        }
    }
}

impl ServiceLimits {
    pub(in crate::tcp) fn admission_limits(&self) -> AdmissionLimits {
        self.admission.unwrap_or(AdmissionLimits::default_for(self.connections_max))
    }

    pub(super) fn check_limits(&self) -> Result<(), Error> {
        let refuse = |what: &str, found: u64, expected: &str| {
            Err(Error::usage(format!("limits: {what} is {found}, expected {expected}")))
        };
        if !self.transfer_bytes_max.is_power_of_two()
            || !(8192..=1 << 24).contains(&self.transfer_bytes_max)
        {
            let found = self.transfer_bytes_max.into();
            return refuse("transfer_bytes_max", found, "a power of two from 8192 to 16 MiB");
        }
        if self.in_capsule_bytes > 8192 || !self.in_capsule_bytes.is_multiple_of(16) {
            let found = self.in_capsule_bytes.into();
            return refuse("in_capsule_bytes", found, "a multiple of 16 up to 8192");
        }
        if !(2..=4096).contains(&self.queue_entries) {
            return refuse("queue_entries", self.queue_entries.into(), "2 to 4096");
        }
        Ok(())
    }

    /// Configuration of the protocol engine of a connection.
    pub(in crate::tcp) fn controller_config(&self) -> ControllerConfig {
        ControllerConfig {
            depth: self.queue_entries,
            in_capsule_bytes: self.in_capsule_bytes,
            transfer_bytes_max: self.transfer_bytes_max,
            header_digest: self.digests,
            data_digest: self.digests,
            h2c_bytes_max: self.transfer_bytes_max,
            success: self.success,
            timeouts: Timeouts::default(),
            ..ControllerConfig::default()
        }
    }
}
