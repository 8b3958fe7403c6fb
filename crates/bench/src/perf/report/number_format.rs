//! Number formatting.

use tenmil_base::Span;

use crate::perf::perf_result::per_second;

/// I/O rate from a count: `31.4 M IOPS`.
pub fn show_rate(count: u64, elapsed: Span) -> String {
    show_iops(per_second(count, elapsed))
}

/// I/O rate: `31.4 M IOPS`, `870 k IOPS`.
pub fn show_iops(iops: f64) -> String {
    let (number, prefix) = scale_to_prefix(iops);
    let space = if prefix.is_empty() { "" } else { " " };
    format!("{number}{space}{prefix} IOPS")
}

/// Byte rate from a count, in powers of ten: `128.6 GB/s`.
pub fn show_bytes_per_second(bytes: u64, elapsed: Span) -> String {
    show_byte_rate(per_second(bytes, elapsed))
}

/// Byte rate in powers of ten: `128.6 GB/s`.
pub fn show_byte_rate(bytes_per_second: f64) -> String {
    let (number, prefix) = scale_to_prefix(bytes_per_second);
    format!("{number} {prefix}B/s")
}

/// Duration with three digits: `812 ns`, `4.15 µs`, `80.2 µs`, `1.03 ms`.
#[expect(clippy::cast_precision_loss, reason = "shown to people")]
pub fn show_ns(ns: u64) -> String {
    show_ns_f64(ns as f64)
}

/// Duration with three digits.
pub fn show_ns_f64(ns: f64) -> String {
    let (value, unit) = match ns {
        ns if ns < 999.5 => (ns, "ns"),
        ns if ns < 999_500.0 => (ns / 1e3, "µs"),
        ns if ns < 999_500_000.0 => (ns / 1e6, "ms"),
        ns => (ns / 1e9, "s"),
    };
    let whole = unit == "ns" && (ns >= 99.95 || (ns - ns.round()).abs() < 1e-9);
    format!("{value:.*} {unit}", if whole { 0 } else { decimals_for_three_digits(value) })
}

/// Count with its digits in groups of three: `314 159 265`.
pub fn show_count(count: u64) -> String {
    let digits = count.to_string();
    let first = digits.len() % 3;
    let mut text = digits[..first].to_owned();
    for group in digits.as_bytes()[first..].chunks(3) {
        if !text.is_empty() {
            text.push(' ');
        }
        text.extend(group.iter().map(|digit| char::from(*digit)));
    }
    text
}

/// Number and SI prefix: `31.4` and `M`, `12` and an empty prefix.
pub fn scale_to_prefix(value: f64) -> (String, &'static str) {
    let (scaled, prefix) = match value {
        value if value < 999.5 => return (format!("{value:.0}"), ""),
        value if value < 999_950.0 => (value / 1e3, "k"),
        value if value < 999_950_000.0 => (value / 1e6, "M"),
        value if value < 999_950_000_000.0 => (value / 1e9, "G"),
        value => (value / 1e12, "T"),
    };
    (format!("{scaled:.1}"), prefix)
}

/// Number of decimals that makes three digits of `value`.
fn decimals_for_three_digits(value: f64) -> usize {
    match value {
        value if value < 9.995 => 2,
        value if value < 99.95 => 1,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::{show_byte_rate, show_count, show_iops, show_ns, show_ns_f64};
    use tenmil_base::text::format_size;

    #[test]
    fn rates_have_si_prefixes() {
        assert_eq!(show_iops(31_415_926.0), "31.4 M IOPS");
        assert_eq!(show_iops(999_960.0), "1.0 M IOPS");
        assert_eq!(show_iops(870_000.0), "870.0 k IOPS");
        assert_eq!(show_iops(12.4), "12 IOPS");
        assert_eq!(show_byte_rate(128.6e9), "128.6 GB/s");
    }

    #[test]
    fn times_have_three_digits() {
        for (ns, text) in [
            (0, "0 ns"),
            (812, "812 ns"),
            (1000, "1.00 µs"),
            (4_153, "4.15 µs"),
            (80_249, "80.2 µs"),
            (999_499, "999 µs"),
            (999_500, "1.00 ms"),
            (2_500_000_000, "2.50 s"),
        ] {
            assert_eq!(show_ns(ns), text);
        }
        assert_eq!(show_ns_f64(31.84), "31.8 ns");
        assert_eq!(show_ns_f64(4.0), "4 ns");
    }

    #[test]
    fn counts_are_grouped_and_sizes_use_binary_prefixes() {
        assert_eq!(show_count(314_159_265), "314 159 265");
        assert_eq!(show_count(1_000), "1 000");
        assert_eq!(show_count(7), "7");
        assert_eq!(format_size(1 << 40), "1 TiB");
        assert_eq!(format_size(64 << 20), "64 MiB");
        assert_eq!(format_size(1536), "1.5 KiB");
        assert_eq!(format_size(512), "512 bytes");
    }
}
