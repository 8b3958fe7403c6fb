//! Block device behind an emulated controller.

use std::sync::Arc;

use tenmil_base::BlockDevice;
use tenmil_block::OpenedDevice;
use tenmil_dma::RegionTable;
use tenmil_drivers::{
    FileDevice, FileDeviceOptions, ModelProfile, ModeledLatencyDevice, NullDevice, RamDevice,
};

use super::EmuPlan;
use crate::{EmuMedium, EmuSpec};
use tenmil_base::Error;

/// Maximum number of regions of one block device: its data, and the buffers of each channel.
pub(super) const REGIONS_MAX: usize = 130;

/// Opens the block device of SSD `number` of `spec`.
pub(super) fn open(
    spec: &EmuSpec,
    number: u32,
    regions: &RegionTable,
    plan: &EmuPlan<'_>,
) -> Result<OpenedDevice, Error> {
    let refuse = |error: Error| Error::new(error.category(), format!("{spec}: {error}"));
    let EmuSpec { block_size, size_bytes, .. } = *spec;
    let block_count = size_bytes / u64::from(block_size);
    let ram = || {
        let ram = RamDevice::new(regions, block_size, block_count);
        ram.map(|ram| if plan.fills { ram.new_filled() } else { ram }).map_err(refuse)
    };
    let made = |medium: Arc<dyn BlockDevice>| {
        OpenedDevice::without_existing_data(medium, spec.medium.to_string())
    };
    Ok(match &spec.medium {
        EmuMedium::Null => {
            made(Arc::new(NullDevice::new(block_size, block_count).map_err(refuse)?))
        }
        EmuMedium::Ram => made(Arc::new(ram()?)),
        EmuMedium::Model { name } => {
            let profile = ModelProfile::find_by_name(name)
                .ok_or_else(|| Error::usage(format!("{spec}: there is no model `{name}`")))?;
            let seed = plan.seed.wrapping_add(u64::from(number));
            made(Arc::new(ModeledLatencyDevice::new(Arc::new(ram()?), profile, seed)))
        }
        EmuMedium::File { path } => {
            let options = FileDeviceOptions {
                path: path.into(),
                size_bytes: spec.size_bytes_known(),
                block_size,
                direct: true,
                read_only: false,
                engine: tenmil_linux::file_engine::EngineChoice::Best,
            };
            let file = FileDevice::open(regions, &options).map_err(refuse)?;
            let existing = file.existing_data().into_iter().collect();
            let description = file.description();
            OpenedDevice {
                existing,
                ..OpenedDevice::without_existing_data(Arc::new(file), description)
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use tenmil_base::ExtentKind;
    use tenmil_dma::RegionTable;

    use super::open;
    use crate::EmuSpec;
    use crate::emu::EmuPlan;
    use crate::fast_path_switches::FastPathSwitches;

    /// A read of a block that was never written would transfer no data, so its measurement would be
    /// meaningless.
    #[test]
    fn memory_medium_is_in_memory() {
        for uri in ["emu:ram?size=1m", "emu:model:p4600?size=1m"] {
            for fills in [false, true] {
                let specs = [uri.parse::<EmuSpec>().unwrap()];
                let plan = EmuPlan {
                    specs: &specs,
                    queue_pairs: 1,
                    depth: 1,
                    buffer_bytes: 0,
                    techniques: &FastPathSwitches::default(),
                    device_cores: &[None],
                    yields: true,
                    interrupts: false,
                    fills,
                    seed: 1,
                };
                let opened = open(&specs[0], 0, &RegionTable::new(2), &plan).unwrap();
                let extent = opened.medium.block_status(0).unwrap();
                let expected = if fills { ExtentKind::Data } else { ExtentKind::Hole };
                assert_eq!(
                    (extent.blocks, extent.kind),
                    (opened.medium.limits().block_count, expected)
                );
            }
        }
    }
}
