//! Devices that were opened for reading only and are to be written: namespaces and exports whose `read-only` goes.
//!
//! A file that is open for reading only cannot be written, and its lock keeps writers out, also those of this
//! process. So such a device is closed before it is opened again:
//!
//! ```text
//!   release ─ wait until it is closed ─ prepare ─ commit
//!                                          └─ refused: the former configuration is prepared and committed again
//! ```
//!
//! Hosts see the namespace go and come, as for every change of its write protection.

use tenmil_base::Span;
use tenmil_block::Bdev;
use tenmil_rpc::target_config::TargetConfig;

use super::LiveConfig;

/// Longest wait for the connections to close their channels.
const CLOSE_MAX: Span = Span::from_secs(2);

impl LiveConfig {
    /// Stops serving the devices that are open for reading only and that `requested` has for writing, and closes
    /// them. Returns whether there were any.
    pub(super) fn release_read_only_devices(&mut self, requested: &TargetConfig) -> bool {
        let mut released: Vec<Bdev> = self.exports.release_read_only(requested);
        for stood in &mut self.subsystems {
            let nqn = &stood.requested.nqn;
            let Some(new) = requested.subsystems.iter().find(|one| one.nqn == *nqn) else {
                continue;
            };
            let (gone, stays) =
                std::mem::take(&mut stood.namespaces).into_iter().partition(|served| {
                    let is_it = |one: &tenmil_rpc::target_config::NamespaceConfig| {
                        one.uri == served.requested.uri && !one.is_read_only
                    };
                    served.descriptor.claim().is_read_only() && new.namespaces.iter().any(is_it)
                });
            stood.namespaces = stays;
            let gone: Vec<super::LiveNamespace> = gone;
            for served in gone {
                stood.subsystem.remove_namespace(served.requested.nsid);
                released.push(served.device);
            }
        }
        if released.is_empty() {
            return false;
        }
        self.publish_controls(&self.subsystems);
        released.into_iter().for_each(|device| self.closing.add_device(device));
        self.closing.close_within(&self.context.clock, CLOSE_MAX);
        true
    }

    /// Serves again what was released for a configuration that is refused.
    pub(super) fn restore_released_devices(&mut self) {
        let Some(config) = self.configuration.clone() else { return };
        let failed = match self.prepare(&config) {
            Ok(prepared) => self.commit(config, prepared).failed,
            Err(unfit) => vec![unfit.refused.text],
        };
        for failed in failed {
            tracing::error!(cause = %failed, "after a refused change: {failed}");
        }
    }
}
