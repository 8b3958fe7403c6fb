//! `emu:` as a kind of block device.

use std::sync::Arc;

use block::uri::Uri;
use block::{MediumError, Opened, Opener};
use host::Cores;

use super::fleet::{Fleet, SsdMedium};
use super::{EmuPlan, Emulated};
use crate::perf::options::Techniques;
use crate::{EmuSpec, Refused};

/// Commands in flight on a channel, where the controller's rings hold as many.
const DEPTH: u32 = 127;

/// Opens emulated SSDs, each with its driver, on a device's thread of its own.
#[derive(Clone, Copy, Debug)]
pub struct Kind {
    /// Whether every block of one in memory is written first, so that a read of it moves bytes.
    pub fills: bool,
}

impl block::Kind for Kind {
    fn open(&self, opener: &Opener<'_>, uri: &Uri) -> Result<Opened, MediumError> {
        let spec = EmuSpec::of(uri)?;
        if spec.count != 1 {
            let problem = format!("count is {}, expected 1: one device is one SSD", spec.count);
            return Err(uri.refuse(problem).into());
        }
        let medium = start(opener, &spec, self.fills)
            .map_err(|refused| MediumError::new(refused.blame, refused.text))?;
        let existing = medium.existing();
        Ok(Opened {
            existing,
            ..Opened::fresh(Arc::new(medium), "an emulated SSD behind its driver")
        })
    }
}

/// Brings one SSD up.
pub(super) fn start(
    opener: &Opener<'_>,
    spec: &EmuSpec,
    fills: bool,
) -> Result<SsdMedium, Refused> {
    let techniques = Techniques::default();
    let plan = EmuPlan {
        specs: std::slice::from_ref(spec),
        queue_pairs: spec.queues,
        depth: DEPTH.min(spec.depth_max()),
        buffer_bytes: 0,
        techniques: &techniques,
        device_cores: &[None],
        gives_way: Cores::allowed().len() < 2,
        interrupts: true,
        fills,
        seed: opener.seed,
    };
    let emulated = Emulated::start_in(opener.regions, &plan, &opener.clock)?;
    let channels_max = u32::from(spec.queues);
    Fleet::new(emulated, plan.depth, channels_max, &techniques, opener.clock)?.medium(0)
}
