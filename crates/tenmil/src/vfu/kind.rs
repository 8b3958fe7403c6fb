//! `vfio-user:` as a kind of block device.

use std::sync::Arc;

use block::uri::Uri;
use block::{Existing, MediumError, Opened, Opener};

use super::attached::Attached;
use super::channel::VfuMedium;
use super::name::VfuName;

/// Attaches controllers of other processes.
#[derive(Clone, Copy, Debug)]
pub struct Kind;

impl block::Kind for Kind {
    fn open(&self, opener: &Opener<'_>, uri: &Uri) -> Result<Opened, MediumError> {
        let name = VfuName::of(uri)?;
        let attached = Attached::call(&name, opener.regions, opener.clock);
        let medium = attached.and_then(VfuMedium::new);
        let medium = medium.map_err(|refused| MediumError::new(refused.blame, refused.text))?;
        // Whatever it holds, it was there before.
        let limits = base::Medium::limits(&medium);
        let bytes = limits.block_count.saturating_mul(u64::from(limits.block_size));
        let existing =
            vec![Existing { name: uri.to_string(), found: format!("{bytes} bytes"), path: None }];
        let what = "a controller of another process, over vfio-user";
        Ok(Opened { existing, ..Opened::fresh(Arc::new(medium), what) })
    }
}
