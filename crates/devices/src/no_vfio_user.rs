//! Replacement for `vfio-user:` in builds without it.

use tenmil_base::{Error, ErrorCategory};
use tenmil_block::uri::Uri;
use tenmil_block::{OpenedDevice, Opener};

/// Returns an error that names the feature.
pub(crate) fn open(_: &Opener<'_>, uri: &Uri) -> Result<OpenedDevice, Error> {
    let text = format!(
        "{uri}: this program was built without vfio-user, expected the feature `vfio-user` of the \
         crate `tenmil`"
    );
    Err(Error::new(ErrorCategory::Environment, text))
}
