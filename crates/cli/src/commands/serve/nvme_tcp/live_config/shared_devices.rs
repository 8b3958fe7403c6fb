//! Devices named in the configuration file: opened once for all their users, closed after the last.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use tenmil_base::BlockDevice;
use tenmil_base::Error;
use tenmil_block::uri::Uri;
use tenmil_block::{DeviceControl, DeviceType, ExistingData, OpenedDevice, Opener};

/// Table of open devices by name.
#[derive(Default)]
pub(super) struct SharedDevices(Mutex<Vec<SharedDevice>>);

struct SharedDevice {
    /// The `device:` URI and the URI it stands for.
    uri: Uri,
    medium: Weak<dyn BlockDevice>,
    description: String,
    existing: Vec<ExistingData>,
    handles: Vec<DeviceControl>,
    identities: Vec<(Uri, String)>,
}

impl DeviceType for SharedDevices {
    fn open(&self, opener: &Opener<'_>, uri: &Uri) -> Result<OpenedDevice, Error> {
        if let Some(open) = self.find_open(uri) {
            return Ok(open);
        }
        // The lock is not held while the device is opened, because a device below it may be a named
        // one, too.
        let opened = opener.open(uri.single_child()?)?;
        let OpenedDevice { medium, description, existing, handles, identities } = opened.clone();
        let medium = Arc::downgrade(&medium);
        let uri = uri.clone();
        let open = SharedDevice { uri, medium, description, existing, handles, identities };
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|other| other.medium.strong_count() > 0);
        all.push(open);
        Ok(opened)
    }
}

impl SharedDevices {
    fn find_open(&self, uri: &Uri) -> Option<OpenedDevice> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.iter().filter(|open| open.uri == *uri).find_map(SharedDevice::open_if_alive)
    }
}

impl SharedDevice {
    /// The device for one more user, unless its last user has closed it.
    fn open_if_alive(&self) -> Option<OpenedDevice> {
        let Self { description, existing, handles, identities, .. } = self;
        Some(OpenedDevice {
            medium: self.medium.upgrade()?,
            description: description.clone(),
            existing: existing.clone(),
            handles: handles.clone(),
            identities: identities.clone(),
        })
    }
}
