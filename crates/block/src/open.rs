//! Opens a device stack from its URI.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use tenmil_base::{BlockDevice, ErrorCategory};
use tenmil_dma::RegionTable;
use tenmil_linux::Clock;

use crate::ExistingData;
use crate::uri::{Uri, UriError};
use tenmil_base::Error;

/// Context that every device of a run is opened with. Stacked devices open their children with the same.
pub struct Opener<'a> {
    /// The table that resolves the segments of every request. A device registers regions in it: one for
    /// its own memory, and one or two for each of its channels.
    pub regions: &'a RegionTable,
    /// The clock of devices that run threads of their own.
    pub clock: Clock,
    /// The seed of all randomness, unless a URI sets its own.
    pub seed: u64,
    /// The device types by URI scheme. Of several with one name, the first is used.
    pub kinds: &'a [NamedDeviceType<'a>],
}

/// A device type with its URI scheme.
pub type NamedDeviceType<'a> = (&'a str, &'a dyn DeviceType);

/// A device type: opens the devices of one URI scheme.
pub trait DeviceType: Sync {
    /// Opens the device that `uri` names.
    ///
    /// # Errors
    ///
    /// If the URI has an option that this type does not know, or the device cannot be opened.
    fn open(&self, opener: &Opener<'_>, uri: &Uri) -> Result<OpenedDevice, Error>;
}

impl<F: Sync> DeviceType for F
where
    F: Fn(&Opener<'_>, &Uri) -> Result<OpenedDevice, Error>,
{
    fn open(&self, opener: &Opener<'_>, uri: &Uri) -> Result<OpenedDevice, Error> {
        self(opener, uri)
    }
}

/// An open block device with its description.
#[derive(Clone)]
pub struct OpenedDevice {
    /// The block device.
    pub medium: Arc<dyn BlockDevice>,
    /// One line for the user: what the device is, and its limitations.
    pub description: String,
    /// Existing data below this device that this run did not create and that a write would destroy.
    pub existing: Vec<ExistingData>,
    /// Run-time controls of this device and of the devices below it.
    pub handles: Vec<DeviceControl>,
    /// Unique names of this device and of the devices below it, by their URIs: the [`BlockDevice::identity`]
    /// of a device, the UUID of a volume (unique in its pool) and the UUID of a mirror.
    pub identities: Vec<(Uri, String)>,
}

/// Run-time control of an open device, of a type that its driver defines.
#[derive(Clone)]
pub struct DeviceControl {
    uri: String,
    control: Arc<dyn Any + Send + Sync>,
}

impl DeviceControl {
    /// A control of the device that `uri` names.
    pub fn new(uri: &Uri, control: impl Any + Send + Sync) -> Self {
        Self { uri: uri.to_string(), control: Arc::new(control) }
    }

    /// The URI of the controlled device.
    pub fn uri(&self) -> &str {
        &self.uri
    }

    /// Whether both are the same control.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.control, &other.control)
    }

    /// The control, if it is of this type.
    pub fn downcast<T: Any>(&self) -> Option<&T> {
        self.control.downcast_ref()
    }
}

impl fmt::Debug for DeviceControl {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("DeviceControl").field("uri", &self.uri).finish_non_exhaustive()
    }
}

/// Joins two tables of device types. `N` is the sum of their lengths.
///
/// # Panics
///
/// If it is not.
pub const fn join_device_types<const N: usize>(
    first: &[NamedDeviceType<'static>],
    second: &[NamedDeviceType<'static>],
) -> [NamedDeviceType<'static>; N] {
    assert!(N == first.len() + second.len(), "N is the sum of the lengths");
    let mut all = [first[0]; N];
    let mut index = 0;
    while index < N {
        all[index] = if index < first.len() { first[index] } else { second[index - first.len()] };
        index += 1;
    }
    all
}

impl Opener<'_> {
    /// Opens the device that `uri` names and the devices below it.
    ///
    /// # Errors
    ///
    /// If the scheme is unknown, the URI has an option that its type does not know, or the device cannot
    /// be opened.
    pub fn open(&self, uri: &Uri) -> Result<OpenedDevice, Error> {
        let scheme = uri.scheme();
        let Some((_, kind)) = self.kinds.iter().find(|(name, _)| *name == scheme) else {
            let mut names: Vec<String> = Vec::new();
            for (name, _) in self.kinds {
                let name = format!("{name}:");
                if !names.contains(&name) {
                    names.push(name);
                }
            }
            let expected = names.join(", ");
            let other = hint_for_unknown_scheme(uri);
            let text =
                format!("no devices of kind `{scheme}`, expected one of {expected}; {other}");
            return Err(uri.error(text).into());
        };
        let mut opened = kind.open(self, uri)?;
        if uri.children().is_empty() {
            opened.add_identity(uri);
        }
        Ok(opened)
    }
}

/// What the text of a URI of an unknown kind may mean instead.
fn hint_for_unknown_scheme(uri: &Uri) -> String {
    let is_hexadecimal = uri.scheme().bytes().all(|byte| byte.is_ascii_hexdigit());
    match uri.scheme().len() {
        // DOMAIN:BUS:DEVICE.FUNCTION, or without the domain.
        2 | 4 if is_hexadecimal => format!("an SSD on the PCI bus is `pcie:{uri}`"),
        _ => format!("a file is `file:{uri}`"),
    }
}

impl OpenedDevice {
    /// A newly created device without existing data.
    pub fn without_existing_data(
        medium: Arc<dyn BlockDevice>,
        description: impl Into<String>,
    ) -> Self {
        let (existing, handles, identities) = (Vec::new(), Vec::new(), Vec::new());
        Self { medium, description: description.into(), existing, handles, identities }
    }

    /// Replaces the block device by one stacked on it, and keeps the data, controls and identities below.
    #[must_use]
    pub fn with_device_stacked_on(
        self,
        medium: Arc<dyn BlockDevice>,
        description: impl Into<String>,
    ) -> Self {
        Self { medium, description: description.into(), ..self }
    }

    /// Adds the unique name of this device, if it has one.
    pub fn add_identity(&mut self, uri: &Uri) {
        if let Some(name) = self.medium.identity() {
            self.identities.push((uri.clone(), name));
        }
    }

    /// Adds a run-time control.
    #[must_use]
    pub fn with_control(mut self, handle: DeviceControl) -> Self {
        self.handles.push(handle);
        self
    }
}

impl fmt::Debug for OpenedDevice {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { description, existing, .. } = self;
        out.debug_tuple("Opened").field(description).field(existing).finish()
    }
}

impl From<UriError> for Error {
    fn from(error: UriError) -> Self {
        Self::new(ErrorCategory::Usage, error.to_string())
    }
}

/// The number of blocks of `block_size` in `size_bytes`.
///
/// # Errors
///
/// If it is not a whole number of at least one.
pub fn whole_block_count(uri: &Uri, size_bytes: u64, block_size: u32) -> Result<u64, UriError> {
    let block = u64::from(block_size);
    if size_bytes == 0 || !size_bytes.is_multiple_of(block) {
        return Err(uri.error(format!(
            "size is {size_bytes} bytes, expected a multiple of the block of {block} bytes"
        )));
    }
    Ok(size_bytes / block)
}

/// Block size in bytes if the URI does not set one.
pub const BLOCK_DEFAULT: u32 = 512;
