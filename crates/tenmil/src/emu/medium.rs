//! What stands behind an emulated controller.

use std::sync::Arc;

use base::Medium;
use block::{FileMedium, FileMediumOptions, MediumError, Model, Null, Profile, Ram};
use dma::Regions;

use crate::{EmuMedium, EmuSpec, Refused, Uri};

/// Places in the table of regions that one medium may take: its store, and what each channel needs.
pub(super) const REGIONS_MAX: usize = 130;

/// Opens the medium of SSD `number` of `uri`.
pub(super) fn open(
    uri: &Uri,
    number: u32,
    regions: &Regions,
    seed: u64,
) -> Result<Arc<dyn Medium>, Refused> {
    let Uri::Emu(spec) = uri;
    let refuse = |error: MediumError| {
        let text = format!("{uri}: {error}");
        match error.blame() {
            base::Blame::Caller => Refused::caller(text),
            base::Blame::Machine => Refused::machine(text),
            base::Blame::Peer => Refused::peer(text),
        }
    };
    let EmuSpec { block_size, size_bytes, .. } = *spec;
    let block_count = size_bytes / u64::from(block_size);
    let ram = || Ram::new(regions, block_size, block_count).map_err(refuse);
    Ok(match &spec.medium {
        EmuMedium::Null => Arc::new(Null::new(block_size, block_count).map_err(refuse)?),
        EmuMedium::Ram => Arc::new(ram()?),
        EmuMedium::Model { name } => {
            let profile = Profile::named(name)
                .ok_or_else(|| Refused::caller(format!("{uri}: there is no model `{name}`")))?;
            Arc::new(Model::new(Arc::new(ram()?), profile, seed.wrapping_add(u64::from(number))))
        }
        EmuMedium::File { path } => {
            let path = if spec.count == 1 { path.clone() } else { format!("{path}.{number}") };
            let options = FileMediumOptions {
                path: path.into(),
                size_bytes: (size_bytes != 0).then_some(size_bytes),
                block_size,
                direct: true,
                engine: host::engine::Choice::Best,
            };
            Arc::new(FileMedium::open(regions, &options).map_err(refuse)?)
        }
    })
}
