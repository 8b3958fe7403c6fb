//! Parser for quantities typed by users: sizes, counts, durations.
//!
//! Size suffixes are powers of two (`4k` is 4096 bytes), as in other storage benchmarks. Count and rate
//! suffixes are powers of ten (`2M` is two million).
//! Each error is the second half of a line whose first half is the name of the option.

use tenmil_base::Span;

/// Parses a size in bytes: `4096`, `4k`, `4KiB`, `1m`, `2g`, `1t`.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let expected = "expected a size in bytes such as 4096, 4k, 64KiB or 1m";
    let (number, shift) = split_unit(text, &[("k", 10), ("m", 20), ("g", 30), ("t", 40)], "ib");
    let value: u64 = number.parse().map_err(|_| format!("`{text}` is not a size, {expected}"))?;
    value.checked_mul(1 << shift).ok_or_else(|| format!("`{text}` is too large, {expected}"))
}

/// Parses a count: `1000000`, `500k`, `2M`.
pub fn parse_count(text: &str) -> Result<u64, String> {
    let expected = "expected a whole number such as 1000, 500k or 2M";
    let (number, zeroes) = split_unit(text, &[("k", 3), ("m", 6), ("g", 9)], "");
    let value: u64 = number.parse().map_err(|_| format!("`{text}` is not a count, {expected}"))?;
    value
        .checked_mul(10_u64.pow(zeroes))
        .ok_or_else(|| format!("`{text}` is too large, {expected}"))
}

/// Parses a duration: seconds without a unit, or `80us`, `500ms`, `10s`, `2m`.
pub fn parse_time(text: &str) -> Result<Span, String> {
    let expected = "expected seconds such as 10 or 0.5, or 80us, 500ms or 2m";
    let refuse = || format!("`{text}` is not a time, {expected}");
    let units =
        [("ns", 1), ("us", 1_000), ("ms", 1_000_000), ("s", 1_000_000_000), ("m", 60_000_000_000)];
    let unit = units.iter().find_map(|(unit, ns)| Some((text.strip_suffix(unit)?, *ns)));
    let (number, unit_ns) = unit.unwrap_or((text, 1_000_000_000_u64));
    let (whole, part) = number.split_once('.').unwrap_or((number, "0"));
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    if !digits(whole) || !digits(part) || part.len() > 9 {
        return Err(refuse());
    }
    let whole: u64 = whole.parse().map_err(|_| refuse())?;
    let scale = 10_u64.pow(u32::try_from(part.len()).map_err(|_| refuse())?);
    let part: u64 = part.parse().map_err(|_| refuse())?;
    let part_ns = u128::from(part) * u128::from(unit_ns) / u128::from(scale);
    let ns = u128::from(whole) * u128::from(unit_ns) + part_ns;
    match u64::try_from(ns) {
        Ok(ns) if ns <= TIME_MAX.ns => Ok(Span { ns }),
        _ => Err(format!("`{text}` is too long, expected at most {} days", TIME_MAX.ns / DAY_NS)),
    }
}

const DAY_NS: u64 = 86_400_000_000_000;
const TIME_MAX: Span = Span { ns: 100 * DAY_NS };

/// Splits `4KiB` into `4` and the exponent of its unit. Units are case-insensitive; `more` lists letters
/// that may follow a unit.
fn split_unit<'a>(text: &'a str, units: &[(&str, u32)], more: &str) -> (&'a str, u32) {
    let end = text.bytes().position(|byte| !byte.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let unit = unit.to_ascii_lowercase();
    for (name, meaning) in units {
        if unit.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest == more) {
            return (number, *meaning);
        }
    }
    if unit.is_empty() { (number, 0) } else { ("", 0) }
}

#[cfg(test)]
mod tests {
    use super::{parse_count, parse_size, parse_time};
    use tenmil_base::Span;

    #[test]
    fn sizes_use_binary_and_counts_decimal_units() {
        for (text, bytes) in [("512", 512), ("4k", 4096), ("64KiB", 65_536), ("2M", 2 << 20)] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
        for (text, count) in [("0", 0), ("21", 21), ("500k", 500_000), ("2M", 2_000_000)] {
            assert_eq!(parse_count(text), Ok(count), "{text}");
        }
    }

    #[test]
    fn invalid_size_is_rejected_with_the_accepted_forms() {
        let expected = "expected a size in bytes such as 4096, 4k, 64KiB or 1m";
        for text in ["", "k", "4kb", "-1", "4.5k", "0x10", "4 k"] {
            assert_eq!(parse_size(text), Err(format!("`{text}` is not a size, {expected}")));
        }
        let text = "99999999999t";
        assert_eq!(parse_size(text), Err(format!("`{text}` is too large, {expected}")));
        assert!(parse_count("1.5M").unwrap_err().starts_with("`1.5M` is not a count, expected"));
        assert!(parse_count("99999999999g").unwrap_err().contains("is too large"));
    }

    #[test]
    fn times_default_to_seconds() {
        for (text, ns) in [
            ("10", 10_000_000_000),
            ("0.5", 500_000_000),
            ("500ms", 500_000_000),
            ("80us", 80_000),
            ("7ns", 7),
            ("1.5s", 1_500_000_000),
            ("2m", 120_000_000_000),
            ("0", 0),
        ] {
            assert_eq!(parse_time(text), Ok(Span { ns }), "{text}");
        }
        for text in ["", "s", "1h", "-1", ".5", "1.", "1e3", "inf"] {
            assert!(parse_time(text).unwrap_err().contains("is not a time"), "{text}");
        }
        assert_eq!(
            parse_time("99999999"),
            Err("`99999999` is too long, expected at most 100 days".into())
        );
    }
}
