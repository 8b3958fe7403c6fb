//! `tcp:` as a block device kind.

use std::sync::Arc;

use tenmil_base::BlockDevice;
use tenmil_block::uri::Uri;
use tenmil_block::{ExistingData, OpenedDevice, Opener};

use super::channel::RemoteDevice;
use super::paths::NamespacePaths;
use super::queues_by_type::{QueueMapOptions, QueuesByTypeDevice};
use super::tcp_uri::TcpUri;
use tenmil_base::Error;

/// Connects to remote SSDs.
#[derive(Clone, Copy, Debug)]
pub struct TcpKind;

impl tenmil_block::DeviceType for TcpKind {
    fn open(&self, opener: &Opener<'_>, uri: &Uri) -> Result<OpenedDevice, Error> {
        let name = TcpUri::from_uri(uri)?;
        let (regions, clock) = (opener.regions, opener.clock);
        let paths = NamespacePaths::connect(&name, regions, clock);
        let medium = paths.and_then(RemoteDevice::new);
        let medium = medium.map_err(|refused| Error::new(refused.category, refused.text))?;
        let security = medium.security_description();
        let medium: Arc<dyn BlockDevice> = Arc::new(medium);
        let medium = match name.maps {
            maps if maps == QueueMapOptions::default() => medium,
            maps => Arc::new(QueuesByTypeDevice::new(medium, maps)),
        };
        // A remote namespace always counts as existing data.
        let limits = medium.limits();
        let bytes = limits.block_count.saturating_mul(u64::from(limits.block_size));
        let found = format!("{bytes} bytes");
        let existing = vec![ExistingData { name: format!("{uri:#}"), found, path: None }];
        let what = match name.others.len() {
            0 => "an SSD behind a network, over NVMe/TCP".to_owned(),
            others => format!("an SSD behind a network, over {} paths of NVMe/TCP", others + 1),
        };
        let security = security.map(|how| format!(", with {how}"));
        let what = what + security.as_deref().unwrap_or("");
        Ok(OpenedDevice { existing, ..OpenedDevice::without_existing_data(medium, what) })
    }
}
