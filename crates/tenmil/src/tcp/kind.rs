//! `tcp:` as a kind of block device.

use std::sync::Arc;

use base::Medium;
use block::uri::Uri;
use block::{Existing, MediumError, Opened, Opener};

use super::attached::Attached;
use super::channel::RemoteMedium;
use super::maps::{MappedMedium, Maps};
use super::name::TcpName;
use super::paths::Tended;
use crate::Refused;

/// Calls SSDs behind a network.
#[derive(Clone, Copy, Debug)]
pub struct Kind;

impl block::Kind for Kind {
    fn open(&self, opener: &Opener<'_>, uri: &Uri) -> Result<Opened, MediumError> {
        let name = TcpName::of(uri)?;
        let (regions, clock) = (opener.regions, opener.clock);
        let medium: Result<Arc<dyn Medium>, Refused> = if name.others.is_empty() {
            let attached = Attached::call(&name, regions, clock);
            attached.and_then(RemoteMedium::new).map(|medium| Arc::new(medium) as _)
        } else {
            let tended = Tended::call(&name, regions, clock);
            tended.and_then(RemoteMedium::new).map(|medium| Arc::new(medium) as _)
        };
        let medium = medium.map_err(|refused| MediumError::new(refused.blame, refused.text))?;
        let medium = match name.maps {
            maps if maps == Maps::default() => medium,
            maps => Arc::new(MappedMedium::new(medium, maps)),
        };
        // Whatever it holds, it was there before.
        let limits = medium.limits();
        let bytes = limits.block_count.saturating_mul(u64::from(limits.block_size));
        let found = format!("{bytes} bytes");
        let existing = vec![Existing { name: uri.to_string(), found, path: None }];
        let what = match name.others.len() {
            0 => "an SSD behind a network, over NVMe/TCP".to_owned(),
            others => format!("an SSD behind a network, over {} paths of NVMe/TCP", others + 1),
        };
        Ok(Opened { existing, ..Opened::fresh(medium, what) })
    }
}
