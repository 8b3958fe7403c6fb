//! What stands behind an emulated controller.

use std::sync::Arc;

use base::Medium;
use block::{FileMedium, FileMediumOptions, MediumError, Model, Null, Opened, Profile, Ram};
use dma::Regions;

use super::EmuPlan;
use crate::{EmuMedium, EmuSpec, Refused};

/// Places in the table of regions that one medium may take: its store, and what each channel needs.
pub(super) const REGIONS_MAX: usize = 130;

/// Opens the medium of SSD `number` of `spec`.
pub(super) fn open(
    spec: &EmuSpec,
    number: u32,
    regions: &Regions,
    plan: &EmuPlan<'_>,
) -> Result<Opened, Refused> {
    let refuse = |error: MediumError| Refused::of(error.blame(), format!("{spec}: {error}"));
    let EmuSpec { block_size, size_bytes, .. } = *spec;
    let block_count = size_bytes / u64::from(block_size);
    let ram = || {
        let ram = Ram::new(regions, block_size, block_count);
        ram.map(|ram| if plan.fills { ram.filled() } else { ram }).map_err(refuse)
    };
    let made = |medium: Arc<dyn Medium>| Opened::fresh(medium, spec.medium.to_string());
    Ok(match &spec.medium {
        EmuMedium::Null => made(Arc::new(Null::new(block_size, block_count).map_err(refuse)?)),
        EmuMedium::Ram => made(Arc::new(ram()?)),
        EmuMedium::Model { name } => {
            let profile = Profile::named(name)
                .ok_or_else(|| Refused::caller(format!("{spec}: there is no model `{name}`")))?;
            let seed = plan.seed.wrapping_add(u64::from(number));
            made(Arc::new(Model::new(Arc::new(ram()?), profile, seed)))
        }
        EmuMedium::File { path } => {
            let options = FileMediumOptions {
                path: path.into(),
                size_bytes: spec.size_bytes_known(),
                block_size,
                direct: true,
                read_only: false,
                engine: host::engine::Choice::Best,
            };
            let file = FileMedium::open(regions, &options).map_err(refuse)?;
            let existing = file.existing().into_iter().collect();
            let description = file.describe();
            Opened { existing, ..Opened::fresh(Arc::new(file), description) }
        }
    })
}

#[cfg(test)]
mod tests {
    use base::Holds;
    use dma::Regions;

    use super::open;
    use crate::EmuSpec;
    use crate::emu::EmuPlan;
    use crate::perf::options::Techniques;

    /// A read of what was never written would move no bytes, and a figure of it would say nothing.
    #[test]
    fn what_is_measured_in_memory_lies_there() {
        for uri in ["emu:ram?size=1m", "emu:model:p4600?size=1m"] {
            for fills in [false, true] {
                let specs = [uri.parse::<EmuSpec>().unwrap()];
                let plan = EmuPlan {
                    specs: &specs,
                    queue_pairs: 1,
                    depth: 1,
                    buffer_bytes: 0,
                    techniques: &Techniques::default(),
                    device_cores: &[None],
                    gives_way: true,
                    interrupts: false,
                    fills,
                    seed: 1,
                };
                let opened = open(&specs[0], 0, &Regions::new(2), &plan).unwrap();
                let extent = opened.medium.extent(0).unwrap();
                let expected = if fills { Holds::Data } else { Holds::Hole };
                assert_eq!(
                    (extent.blocks, extent.holds),
                    (opened.medium.limits().block_count, expected)
                );
            }
        }
    }
}
