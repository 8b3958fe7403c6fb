//! Formatting of numbers and names for the screen.

pub(crate) use tenmil_base::text::escape;

/// A rate in at most five characters: `0`, `0.5`, `17`, `3.2k`, `120M`.
pub(crate) fn format_rate(value: f64) -> String {
    const UNITS: [(f64, &str); 4] = [(1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")];
    // From here on, rounding to three digits would yield four.
    let unit = UNITS.iter().find(|(scale, _)| value >= scale * 0.9995);
    let (scaled, unit) = unit.map_or((value, ""), |(scale, name)| (value / scale, *name));
    if scaled < 0.05 || (scaled - scaled.round()).abs() < 0.05 || scaled >= 99.95 {
        format!("{scaled:.0}{unit}")
    } else {
        format!("{scaled:.1}{unit}")
    }
}

/// A count in at most five characters.
#[expect(clippy::cast_precision_loss, reason = "shown to people")]
pub(crate) fn format_count(value: u64) -> String {
    format_rate(value as f64)
}

/// A percentage: `0.0`, `12.5`, `100`.
pub(crate) fn format_percent(value: f64) -> String {
    if value >= 99.95 { "100".into() } else { format!("{value:.1}") }
}

/// A duration in at most seven characters: `40 ns`, `1.5 us`, `250 ms`.
#[expect(clippy::cast_precision_loss, reason = "shown to people")]
pub(crate) fn format_span(ns: u64) -> String {
    let (scaled, unit) = match ns {
        0..1_000 => return format!("{ns} ns"),
        1_000..999_500 => (ns as f64 / 1e3, "us"),
        999_500..999_500_000 => (ns as f64 / 1e6, "ms"),
        _ => (ns as f64 / 1e9, "s"),
    };
    if scaled >= 99.95 || (scaled - scaled.round()).abs() < 0.05 {
        format!("{scaled:.0} {unit}")
    } else {
        format!("{scaled:.1} {unit}")
    }
}

/// An age or uptime: `0:07`, `12:34`, `1:02:03`, `3d 1:02:03`.
pub(crate) fn format_age(ns: u64) -> String {
    let seconds = ns / 1_000_000_000;
    let (days, hours) = (seconds / 86_400, seconds / 3_600 % 24);
    let (minutes, seconds) = (seconds / 60 % 60, seconds % 60);
    match (days, hours) {
        (0, 0) => format!("{minutes}:{seconds:02}"),
        (0, hours) => format!("{hours}:{minutes:02}:{seconds:02}"),
        (days, hours) => format!("{days}d {hours}:{minutes:02}:{seconds:02}"),
    }
}

#[cfg(test)]
mod tests {
    use super::{format_age, format_count, format_percent, format_rate, format_span};

    #[test]
    fn rate_has_three_digits_and_a_unit() {
        for (value, text) in [
            (0.0, "0"),
            (0.04, "0"),
            (0.5, "0.5"),
            (1.0, "1"),
            (17.02, "17"),
            (99.94, "99.9"),
            (999.4, "999"),
            (999.6, "1k"),
            (3_210.0, "3.2k"),
            (119_900_000.0, "120M"),
            (5e13, "50T"),
        ] {
            assert_eq!(format_rate(value), text, "{value}");
        }
        assert_eq!(format_count(12_345), "12.3k");
        assert!((0..4_000_u32).all(|step| format_rate(1.007_f64.powf(f64::from(step))).len() <= 5));
    }

    #[test]
    fn percentages_and_durations_are_short() {
        assert_eq!(
            [format_percent(0.0), format_percent(12.46), format_percent(99.96)],
            ["0.0", "12.5", "100"]
        );
        let spans = [40, 1_500, 250_000, 999_600, 2_000_000, 61_000_000_000].map(format_span);
        assert_eq!(spans, ["40 ns", "1.5 us", "250 us", "1 ms", "2 ms", "61 s"]);
        let ages = [7, 754, 3_723, 262_923].map(|seconds| format_age(seconds * 1_000_000_000));
        assert_eq!(ages, ["0:07", "12:34", "1:02:03", "3d 1:02:03"]);
    }
}
