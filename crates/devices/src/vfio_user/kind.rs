//! `vfio-user:` as a block device kind.

use tenmil_base::Error;
use tenmil_block::uri::Uri;
use tenmil_block::{OpenedDevice, Opener};

use super::attach;
use super::vfio_user_uri::VfioUserUri;

/// Attaches controllers of other processes.
#[derive(Clone, Copy, Debug)]
pub struct VfioUserKind;

impl tenmil_block::DeviceType for VfioUserKind {
    fn open(&self, opener: &Opener<'_>, uri: &Uri) -> Result<OpenedDevice, Error> {
        attach(&VfioUserUri::from_uri(uri)?, opener.regions, opener.clock)?.open(uri)
    }
}
