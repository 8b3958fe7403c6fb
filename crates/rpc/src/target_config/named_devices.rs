//! Named devices of a file, and conflicts between their uses.
//!
//! ```text
//!   [[device]]  name = "both"  uri = "mirror:[file:/a],[file:/b]"
//!
//!   split:[device:both]?part=0&parts=2   ──▶   split:[device:[mirror:[file:/a],[file:/b]]/both]?…
//! ```
//!
//! The name alone means the same, and `both/db` is the volume `db` of the pool on it.
//!
//! A name is expanded together with its definition: two equal expansions are the same device, and a
//! redefined name is a different one.

use tenmil_block::uri::{Uri, UriError};

use super::IgnoredLineNumber;

/// URI scheme of a named device: `device:[URI]/NAME`.
pub const SCHEME: &str = "device";

const NAME_MAX: usize = 64;

/// Named devices defined so far.
#[derive(Default)]
pub(super) struct NamedDevices {
    devices: Vec<(String, Uri)>,
    uses: Vec<DeviceUse>,
}

/// Use of a named device.
struct DeviceUse {
    name: String,
    line: IgnoredLineNumber,
    part: DevicePart,
    only_reads: bool,
    user: DeviceUser,
    /// The device of the user, which the named one is a part of.
    whole: Option<Uri>,
}

/// What uses a device. A namespace and an export may have the same one: it is opened once for both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DeviceUser {
    Namespace,
    Export,
}

/// Part of a device that is used.
#[derive(Clone, Copy)]
enum DevicePart {
    Whole,
    /// One of several parts of the same size.
    Equal {
        part: u64,
        parts: u64,
    },
    /// A volume of the pool on the device, which has one instance for all its volumes.
    Volume,
    /// Byte range.
    Bytes {
        from: u64,
        to: u64,
    },
}

impl NamedDevices {
    /// Defines a device.
    pub(super) fn define_device(&mut self, name: &str, uri: Uri) -> Result<(), String> {
        let is_fit = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        if name.is_empty() || name.len() > NAME_MAX || !name.bytes().all(is_fit) {
            return Err(format!(
                "'{name}', expected 1 to {NAME_MAX} letters, digits, hyphens, dots and underscores"
            ));
        }
        if self.defined_uri(name).is_some() {
            return Err(format!("another device is called '{name}', expected each its own name"));
        }
        self.devices.push((name.to_owned(), uri));
        Ok(())
    }

    /// Expands all names in `uri`, which stands on `line`.
    pub(super) fn expand_and_check_uses(
        &mut self,
        uri: Uri,
        line: IgnoredLineNumber,
        only_reads: bool,
        user: DeviceUser,
    ) -> Result<Uri, String> {
        let before = self.uses.len();
        let resolved = self.expand_uri(uri, line, only_reads)?;
        for one in &mut self.uses[before..] {
            (one.user, one.whole) = (user, Some(resolved.clone()));
        }
        // Nested names may exceed the limit of stacked devices.
        resolved.to_string().parse::<Uri>().map_err(|why| why.to_string())?;
        let (earlier, new) = self.uses.split_at(before);
        for (index, one) in new.iter().enumerate() {
            let mut others = earlier.iter().chain(&new[..index]);
            if let Some(other) = others.find(|other| one.conflicts_with(other)) {
                let (name, IgnoredLineNumber(line)) = (&one.name, other.line);
                return Err(format!(
                    "device `{name}` is used in line {line} too, expected one that writes, \
                     or parts that do not overlap: split:[device:{name}]?part=0&parts=2"
                ));
            }
        }
        Ok(resolved)
    }

    fn expand_uri(
        &mut self,
        uri: Uri,
        line: IgnoredLineNumber,
        only_reads: bool,
    ) -> Result<Uri, String> {
        if uri.scheme() == SCHEME {
            let named = self.expand_name(&uri)?;
            let name = named.path().to_owned();
            let (part, user) = (DevicePart::Whole, DeviceUser::Namespace);
            self.uses.push(DeviceUse { name, line, part, only_reads, user, whole: None });
            return Ok(named);
        }
        let only_reads = only_reads && !uri.writes_when_read_only();
        let uri = uri.try_map_children(|child| self.expand_uri(child, line, only_reads))?;
        let is_on_named = uri.children().first().is_some_and(|below| below.scheme() == SCHEME);
        if let Some(last) = self.uses.last_mut().filter(|_| is_on_named) {
            match uri.scheme() {
                "split" => {
                    last.part = DevicePart::from_split_uri(&uri).map_err(|why| why.to_string())?
                }
                "volume" => last.part = DevicePart::Volume,
                _ => {}
            }
        }
        Ok(uri)
    }

    /// The URI `device:NAME` of a device that is defined.
    pub(super) fn device_uri_of(&self, name: &str) -> Option<Uri> {
        self.defined_uri(name).map(|_| Uri::new(SCHEME, name))
    }

    fn defined_uri(&self, name: &str) -> Option<&Uri> {
        Some(&self.devices.iter().find(|(other, _)| other == name)?.1)
    }

    fn expand_name(&self, uri: &Uri) -> Result<Uri, String> {
        uri.options().reject_unconsumed().map_err(|why| why.to_string())?;
        if !uri.children().is_empty() {
            return Err(format!("`{uri}`, expected the name of a device: {SCHEME}:NAME"));
        }
        let name = uri.path();
        let meant = self.defined_uri(name).ok_or_else(|| match self.devices.as_slice() {
            [] => format!("no device is called `{name}`, expected [[device]] with that name above"),
            all => {
                let all: Vec<&str> = all.iter().map(|(name, _)| name.as_str()).collect();
                format!("no device above is called `{name}`, expected one of {}", all.join(", "))
            }
        })?;
        Ok(Uri::with_child(SCHEME, meant.clone(), name))
    }
}

impl DeviceUse {
    /// Whether one of the uses may write to what the other one uses.
    fn conflicts_with(&self, other: &Self) -> bool {
        let is_same_device = self.user != other.user && self.whole == other.whole;
        let may_overlap = self.name == other.name && !self.part.is_disjoint(other.part);
        let has_writer = !(self.only_reads && other.only_reads);
        may_overlap && has_writer && !is_same_device
    }
}

impl DevicePart {
    /// Part that a `split:` URI selects.
    fn from_split_uri(uri: &Uri) -> Result<Self, UriError> {
        let mut fields = uri.options();
        let (part, parts) = (
            fields.number_value("part", 0..=u64::MAX)?,
            fields.number_value("parts", 1..=u64::MAX)?,
        );
        let (from, size) = (fields.size_value("offset")?, fields.size_value("size")?);
        fields.reject_unconsumed()?;
        if let (Some(part), Some(parts)) = (part, parts) {
            return Ok(Self::Equal { part, parts });
        }
        let from = from.unwrap_or(0);
        Ok(Self::Bytes { from, to: size.map_or(u64::MAX, |size| from.saturating_add(size)) })
    }

    /// Whether the parts are disjoint, whatever the size of the device, or the pool on it separates them.
    const fn is_disjoint(self, other: Self) -> bool {
        match (self, other) {
            (Self::Volume, Self::Volume) => true,
            (Self::Equal { part, parts }, Self::Equal { part: other, parts: of }) => {
                parts == of && part != other
            }
            (Self::Bytes { from, to }, Self::Bytes { from: other, to: end }) => {
                to <= other || end <= from
            }
            _ => false,
        }
    }
}
