//! `emu:` as a block device kind.

use std::sync::Arc;

use tenmil_block::uri::Uri;
use tenmil_block::{OpenedDevice, Opener};
use tenmil_linux::CpuList;

use super::device_set::{EmulatedDevices, SsdDevice};
use super::{EmuPlan, EmulatedSsds};
use crate::EmuSpec;
use crate::fast_path_switches::FastPathSwitches;
use tenmil_base::Error;

/// Default depth of a channel, if the rings of the controller are large enough.
const DEPTH: u32 = 127;

/// Opens emulated SSDs, each with its driver and a device thread.
#[derive(Clone, Copy, Debug)]
pub struct EmulatedSsdKind {
    /// Whether every block of a RAM device is written at the start, so that reads transfer data.
    pub fills: bool,
}

impl tenmil_block::DeviceType for EmulatedSsdKind {
    fn open(&self, opener: &Opener<'_>, uri: &Uri) -> Result<OpenedDevice, Error> {
        let spec = EmuSpec::from_uri(uri)?;
        if spec.count != 1 {
            let problem = format!("count is {}, expected 1: one device is one SSD", spec.count);
            return Err(uri.error(problem).into());
        }
        let medium = start(opener, &spec, self.fills)
            .map_err(|refused| Error::new(refused.category, refused.text))?;
        let existing = medium.existing_data_of_set();
        Ok(OpenedDevice {
            existing,
            ..OpenedDevice::without_existing_data(
                Arc::new(medium),
                "an emulated SSD behind its driver",
            )
        })
    }
}

/// Starts and initializes one SSD.
pub(super) fn start(opener: &Opener<'_>, spec: &EmuSpec, fills: bool) -> Result<SsdDevice, Error> {
    let techniques = FastPathSwitches::default();
    let plan = EmuPlan {
        specs: std::slice::from_ref(spec),
        queue_pairs: spec.queues,
        depth: DEPTH.min(spec.depth_max()),
        buffer_bytes: 0,
        techniques: &techniques,
        device_cores: &[None],
        yields: CpuList::allowed_cpus().len() < 2,
        interrupts: true,
        fills,
        seed: opener.seed,
    };
    let emulated = EmulatedSsds::start_in(opener.regions, &plan, &opener.clock)?;
    let channels_max = u32::from(spec.queues);
    EmulatedDevices::new(emulated, plan.depth, channels_max, &techniques, opener.clock)?
        .block_device(0)
}
