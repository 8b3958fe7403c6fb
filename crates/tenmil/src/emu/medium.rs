//! What stands behind an emulated controller.

use std::sync::Arc;

use base::Medium;
use block::{FileMedium, FileMediumOptions, MediumError, Model, Null, Opened, Profile, Ram};
use dma::Regions;

use crate::{EmuMedium, EmuSpec, Refused};

/// Places in the table of regions that one medium may take: its store, and what each channel needs.
pub(super) const REGIONS_MAX: usize = 130;

/// Opens the medium of SSD `number` of `spec`.
pub(super) fn open(
    spec: &EmuSpec,
    number: u32,
    regions: &Regions,
    seed: u64,
) -> Result<Opened, Refused> {
    let refuse = |error: MediumError| Refused::of(error.blame(), format!("{spec}: {error}"));
    let EmuSpec { block_size, size_bytes, .. } = *spec;
    let block_count = size_bytes / u64::from(block_size);
    let ram = || Ram::new(regions, block_size, block_count).map_err(refuse);
    let made = |medium: Arc<dyn Medium>| Opened::fresh(medium, spec.medium.to_string());
    Ok(match &spec.medium {
        EmuMedium::Null => made(Arc::new(Null::new(block_size, block_count).map_err(refuse)?)),
        EmuMedium::Ram => made(Arc::new(ram()?)),
        EmuMedium::Model { name } => {
            let profile = Profile::named(name)
                .ok_or_else(|| Refused::caller(format!("{spec}: there is no model `{name}`")))?;
            let seed = seed.wrapping_add(u64::from(number));
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
