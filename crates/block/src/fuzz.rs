//! One function that reads any bytes as everything this crate reads: names of devices, rules of
//! faults, quantities. It must never panic, whatever the bytes.

use crate::quantity::{parse_count, parse_size, parse_time};
use crate::uri::Uri;
use crate::{Rule, uri};

/// Reads `bytes` in every way, and what was understood once more from how it is written.
///
/// # Panics
///
/// If something does not hold that must: a mistake in this crate, never in the bytes.
pub fn fuzz(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    match text.parse::<Uri>() {
        Ok(uri) => check(&uri, 1),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
    if let Ok(rules) = Rule::parse_all(&text) {
        let written: Vec<String> = rules.iter().map(ToString::to_string).collect();
        assert_eq!(Rule::parse_all(&written.join(";")), Ok(rules), "{written:?}");
    }
    let quantities = [parse_size(&text).err(), parse_count(&text).err(), parse_time(&text).err()];
    assert!(quantities.iter().flatten().all(|refused| refused.starts_with('`')), "{quantities:?}");
}

/// A name is written so that the same is read back, and so is each of those inside it.
fn check(uri: &Uri, storey: usize) {
    let written = uri.to_string();
    assert_eq!(written.parse().as_ref(), Ok(uri), "{written}");
    assert!(storey <= uri::STOREYS_MAX && uri.children().len() <= uri::CHILDREN_MAX);
    uri.children().iter().for_each(|child| check(child, storey + 1));
}

#[cfg(test)]
mod tests {
    use super::fuzz;

    #[test]
    fn inputs_that_come_far_are_read_and_written_back() {
        for text in [
            "",
            "stripe:[file:/a%20b?size=1m],[delay:[ram:2m]?read=1us]?chunk=64k",
            "error:write@0-1023x3;hang:any+100/2",
            "x:%5b%5d?a=%26%25",
            "x:[y:/a[b?k]=1]?b=[]",
            "80us",
            "\u{0}\u{fffd}:",
        ] {
            fuzz(text.as_bytes());
        }
        fuzz(&[0xff, b':', b'[']);
    }
}
