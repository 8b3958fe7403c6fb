//! `pcie:` as a block device kind.

use tenmil_base::Error;
use tenmil_block::uri::Uri;
use tenmil_block::{OpenedDevice, Opener};
use tenmil_linux::StepTimer;

use super::attach;
use super::pcie_uri::PcieUri;

/// Attaches SSDs on the PCI bus.
#[derive(Clone, Copy, Debug)]
pub struct PcieKind;

impl tenmil_block::DeviceType for PcieKind {
    fn open(&self, opener: &Opener<'_>, uri: &Uri) -> Result<OpenedDevice, Error> {
        let mut steps = StepTimer::begin(opener.clock);
        attach(&PcieUri::from_uri(uri)?, opener.regions, &mut steps)?.open(uri)
    }
}
