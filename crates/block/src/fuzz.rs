//! Fuzz entry points: parse arbitrary bytes as every input format of this crate (device URIs,
//! quantities). They must never panic on any input.

use crate::overwrite::{DeviceEdges, probe_signatures};
use crate::quantity_parser::{parse_count, parse_size, parse_time};
use crate::uri;
use crate::uri::Uri;

/// Parses `bytes` with every parser, and parses the text form of each result again.
///
/// # Panics
///
/// If an invariant is violated: a bug in this crate, never in the input.
pub fn fuzz_uri(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    match text.parse::<Uri>() {
        Ok(uri) => check_uri_round_trip(&uri, 1),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
    let quantities = [parse_size(&text).err(), parse_count(&text).err(), parse_time(&text).err()];
    assert!(quantities.iter().flatten().all(|refused| refused.starts_with('`')), "{quantities:?}");
}

/// Probes `bytes` as both edges of a device; the first byte gives the distance between them.
///
/// # Panics
///
/// If an invariant is violated: a bug in this crate, never in the input.
pub fn fuzz_device_edges(bytes: &[u8]) {
    let Some((between, bytes)) = bytes.split_first() else { return };
    let (head, tail) = bytes.split_at(bytes.len() / 2);
    let between = u64::MAX.checked_shr(u32::from(*between)).unwrap_or(0);
    let size_bytes = between.saturating_add(bytes.len() as u64);
    let both = [
        DeviceEdges { head, tail, size_bytes },
        DeviceEdges { head: bytes, tail: bytes, size_bytes },
    ];
    for ends in both {
        for found in probe_signatures(&ends) {
            assert!(found.offset < size_bytes, "{found}");
            assert!(!found.to_string().chars().any(char::is_control), "{found:?}");
        }
    }
}

/// Checks that the text form of a URI, and of each URI inside it, parses to the same URI.
fn check_uri_round_trip(uri: &Uri, depth: usize) {
    let written = uri.to_string();
    assert_eq!(written.parse().as_ref(), Ok(uri), "{written}");
    assert!(depth <= uri::STACK_DEPTH_MAX && uri.children().len() <= uri::CHILDREN_MAX);
    uri.children().iter().for_each(|child| check_uri_round_trip(child, depth + 1));
}

#[cfg(test)]
mod tests {
    use super::{fuzz_device_edges, fuzz_uri};

    #[test]
    fn device_edges_of_any_length_are_probed() {
        for len in [0, 1, 2, 600, 1 << 14] {
            for between in [0, 20, 63, 64, 255] {
                let mut bytes = vec![0x5a; len];
                bytes.splice(0..0, [between]);
                fuzz_device_edges(&bytes);
            }
        }
    }

    #[test]
    fn seed_uris_round_trip() {
        for text in [
            "",
            "stripe:[file:/a%20b?size=1m],[delay:[ram:2m]?read=1us]?chunk=64k",
            "error:write@0-1023x3;hang:any+100/2",
            "x:%5b%5d?a=%26%25",
            "x:[y:/a[b?k]=1]?b=[]",
            "80us",
            "\u{0}\u{fffd}:",
        ] {
            fuzz_uri(text.as_bytes());
        }
        fuzz_uri(&[0xff, b':', b'[']);
    }
}
