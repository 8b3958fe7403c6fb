//! Capabilities of both ends: the JSON of a VERSION message.

use serde_json::{Map, Value, json};

use crate::Violation;
use crate::body_codec::{BodyReader, BodyWriter};

/// Limits of one end for a message (Protocol Specification, VFIO_USER_VERSION). Migration, twin
/// sockets and multiple writes per message are never offered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VersionCapabilities {
    /// Largest number of file descriptors.
    pub files_max: u32,
    /// Largest data of a read or a write in bytes.
    pub data_bytes_max: u32,
}

/// Protocol version of this implementation.
const MAJOR: u16 = 0;
const MINOR: u16 = 1;

/// Largest number of descriptors per message, also the most that QEMU accepts from a peer.
const FILES_MAX: u32 = 16;
const DATA_BYTES_MAX: u32 = 1 << 20;

/// Upper bound applied to the data size that a peer announces.
const DATA_BYTES_CEILING: u64 = 64 << 20;
/// Largest number of descriptors that the kernel passes at once (`SCM_MAX_FD`).
const FILES_CEILING: u64 = 253;

/// Longest VERSION body that is parsed.
pub(crate) const VERSION_BYTES_MAX: usize = 4096;

impl VersionCapabilities {
    /// Capabilities of this end.
    pub const OURS: Self = Self { files_max: FILES_MAX, data_bytes_max: DATA_BYTES_MAX };

    /// Capabilities of a peer that announces none.
    pub const DEFAULT: Self = Self { files_max: 1, data_bytes_max: 1 << 20 };

    /// Encodes the body of a VERSION message with version 0.`minor`.
    pub(crate) fn encode_version(self, minor: u16) -> Vec<u8> {
        let Self { files_max, data_bytes_max } = self;
        let limits = json!({ "max_msg_fds": files_max, "max_data_xfer_size": data_bytes_max });
        let text = json!({ "capabilities": limits }).to_string();
        BodyWriter::default().u16(MAJOR).u16(minor).slice(text.as_bytes()).slice(&[0]).into_bytes()
    }

    /// Body of the client's proposal.
    pub(crate) fn encode_proposal(self) -> Vec<u8> {
        self.encode_version(MINOR)
    }

    /// Parses the body of a VERSION message. Returns the common minor version and the peer's
    /// capabilities.
    pub(crate) fn parse_version(body: &[u8]) -> Result<(u16, Self), Violation> {
        let refuse = |why: &str| Violation::Capabilities { why: why.to_owned() };
        let mut reader = BodyReader(body);
        let (Some(major), Some(minor)) = (reader.u16(), reader.u16()) else {
            return Err(refuse("no version, expected a major and a minor one"));
        };
        if major != MAJOR {
            return Err(Violation::Version { found: major });
        }
        let minor = minor.min(MINOR);
        let text = match reader.remaining().split_last() {
            None => return Ok((minor, Self::DEFAULT)),
            Some((0, text)) => text,
            Some(_) => return Err(refuse("the text ends without a zero byte")),
        };
        let value: Value = serde_json::from_slice(text)
            .map_err(|error| Violation::Capabilities { why: error.to_string() })?;
        let Value::Object(version) = value else { return Err(refuse("not an object")) };
        let limits = match version.get("capabilities") {
            None => return Ok((minor, Self::DEFAULT)),
            Some(Value::Object(limits)) => limits,
            Some(_) => return Err(refuse("`capabilities` is not an object")),
        };
        let files_max =
            capability_value(limits, "max_msg_fds", Self::DEFAULT.files_max, FILES_CEILING)?;
        let data_bytes_max = capability_value(
            limits,
            "max_data_xfer_size",
            Self::DEFAULT.data_bytes_max,
            DATA_BYTES_CEILING,
        )?;
        Ok((minor, Self { files_max, data_bytes_max }))
    }
}

/// Capability `name`: at least 1, clamped to `ceiling`.
fn capability_value(
    limits: &Map<String, Value>,
    name: &str,
    absent: u32,
    ceiling: u64,
) -> Result<u32, Violation> {
    let Some(value) = limits.get(name) else { return Ok(absent) };
    let number = value.as_u64().filter(|number| *number > 0);
    let number = number.ok_or_else(|| Violation::Capabilities {
        why: format!("`{name}` is {value}, expected a number from 1 on"),
    })?;
    Ok(u32::try_from(number.min(ceiling)).unwrap_or(absent))
}

#[cfg(test)]
mod tests {
    use super::VersionCapabilities;
    use crate::Violation;

    fn version_body(text: &str) -> Vec<u8> {
        [&[0, 0, 7, 0], text.as_bytes(), &[0]].concat()
    }

    #[test]
    fn capabilities_round_trip_and_the_lower_minor_version_is_used() {
        let ours = VersionCapabilities::OURS;
        assert_eq!(VersionCapabilities::parse_version(&ours.encode_proposal()), Ok((1, ours)));
        assert_eq!(VersionCapabilities::parse_version(&ours.encode_version(0)), Ok((0, ours)));
        let silent = Ok((0, VersionCapabilities::DEFAULT));
        assert_eq!(VersionCapabilities::parse_version(&[0, 0, 0, 0]), silent);
        let spoken = Ok((1, VersionCapabilities::DEFAULT));
        for text in ["{}", r#"{"capabilities":{}}"#, r#"{"capabilities":{"twin_socket":{}}}"#] {
            assert_eq!(VersionCapabilities::parse_version(&version_body(text)), spoken, "{text}");
        }
    }

    #[test]
    fn peer_limits_are_clamped_to_own_maximum() {
        let text = r#"{"capabilities":{"max_msg_fds":1e3,"max_data_xfer_size":9}}"#;
        assert!(
            VersionCapabilities::parse_version(&version_body(text)).is_err(),
            "a fraction is no count"
        );
        let text = r#"{"capabilities":{"max_msg_fds":1000,"max_data_xfer_size":99999999999}}"#;
        let (_, found) = VersionCapabilities::parse_version(&version_body(text)).unwrap();
        assert_eq!(found, VersionCapabilities { files_max: 253, data_bytes_max: 64 << 20 });
    }

    #[test]
    fn invalid_capabilities_are_rejected_with_the_found_value() {
        for text in [
            "[]",
            "{",
            r#"{"capabilities":1}"#,
            r#"{"capabilities":{"max_msg_fds":0}}"#,
            r#"{"capabilities":{"max_data_xfer_size":-1}}"#,
            r#"{"capabilities":{"max_data_xfer_size":"1"}}"#,
        ] {
            assert!(VersionCapabilities::parse_version(&version_body(text)).is_err(), "{text}");
        }
        assert_eq!(
            VersionCapabilities::parse_version(&[1, 0, 0, 0]).unwrap_err(),
            Violation::Version { found: 1 }
        );
        for short in [&[0, 0, 0][..], &[0, 0, 0, 0, b'{', b'}']] {
            assert!(VersionCapabilities::parse_version(short).is_err(), "{short:?}");
        }
        let deep = version_body(&"[".repeat(4000));
        assert!(VersionCapabilities::parse_version(&deep).is_err());
    }
}
