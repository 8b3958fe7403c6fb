//! `pcie:` as a kind of block device.

use block::uri::Uri;
use block::{MediumError, Opened, Opener};
use host::Steps;

use super::attach;
use super::name::PcieName;

/// Attaches SSDs on the PCI bus.
#[derive(Clone, Copy, Debug)]
pub struct Kind;

impl block::Kind for Kind {
    fn open(&self, opener: &Opener<'_>, uri: &Uri) -> Result<Opened, MediumError> {
        let mut steps = Steps::begin(opener.clock);
        attach(&PcieName::of(uri)?, opener.regions, &mut steps)?.open(uri)
    }
}
