//! Plots of the HTML report, as inline SVG.
//!
//! The plotting library knows fixed colors only, and the page has a light and a dark scheme. Each
//! color here is therefore a number that identifies a role. After drawing it is replaced by the CSS
//! variable of that role.

mod rounds_plot;

use core::ops::Range;

use plotters::chart::{ChartBuilder, ChartContext};
use plotters::coord::ranged1d::{Ranged, ValueFormatter};
use plotters::prelude::{
    AreaSeries, BindKeyPoints, Cartesian2d, Circle, Color, DrawingBackend, EmptyElement,
    IntoDrawingArea, IntoFont, IntoLogRange, LineSeries, PathElement, RGBColor, SVGBackend, Text,
};
use plotters::style::TextStyle;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use tenmil_base::Histogram;

use super::PERCENTILES;
use super::number_format::{scale_to_prefix, show_ns_f64};
use crate::perf::perf_result::{NullBlkResult, TimeSeries};

pub use rounds_plot::{PlotRow, rounds_plot};

/// Role of a color.
#[derive(Clone, Copy)]
struct ColorRole {
    colour: RGBColor,
    hex: &'static str,
    style: &'static str,
}

const INK: ColorRole = ColorRole { colour: RGBColor(1, 1, 1), hex: "#010101", style: "var(--ink)" };
const MUTED: ColorRole =
    ColorRole { colour: RGBColor(2, 2, 2), hex: "#020202", style: "var(--muted)" };
const GRID: ColorRole =
    ColorRole { colour: RGBColor(3, 3, 3), hex: "#030303", style: "var(--grid)" };
const ACCENT: ColorRole =
    ColorRole { colour: RGBColor(4, 4, 4), hex: "#040404", style: "var(--accent)" };
const SOFT: ColorRole =
    ColorRole { colour: RGBColor(5, 5, 5), hex: "#050505", style: "var(--soft)" };
const MARK: ColorRole =
    ColorRole { colour: RGBColor(6, 6, 6), hex: "#060606", style: "var(--mark)" };
const ROLES: [ColorRole; 6] = [INK, MUTED, GRID, ACCENT, SOFT, MARK];

const FONT: &str = "sans-serif";
const FONT_SIZE: i32 = 13;
const SIZE: (u32, u32) = (1040, 300);

/// Histogram bins per power of two.
const BINS_PER_OCTAVE: f64 = 20.0;

/// I/Os per second over time.
#[expect(clippy::cast_precision_loss, reason = "a drawing")]
pub(super) fn throughput_plot(series: &TimeSeries) -> String {
    let interval_s = series.interval.as_secs_f64();
    if series.ios.is_empty() || series.interval.ns == 0 {
        return String::new();
    }
    let rates: Vec<f64> = series.ios.iter().map(|ios| *ios as f64 / interval_s).collect();
    let end = rates.len() as f64 * interval_s;
    let top = rates.iter().copied().fold(1.0, f64::max) * 1.15;
    // Each point is drawn in the middle of its interval, and the curve extends to both edges.
    let points = || {
        let inner = rates.iter().enumerate();
        let inner = inner.map(|(index, rate)| ((index as f64 + 0.5) * interval_s, *rate));
        core::iter::once((0.0, rates[0])).chain(inner).chain([(end, rates[rates.len() - 1])])
    };
    draw_svg(SIZE, |backend| {
        let mut chart = chart_frame(backend, 0.0..end, 0.0..top);
        draw_mesh(&mut chart, &|x| format!("{x:.0} s"), &show_axis_rate);
        chart.draw_series(AreaSeries::new(points(), 0.0, SOFT.colour)).ok();
        chart.draw_series(LineSeries::new(points(), ACCENT.colour.stroke_width(2))).ok();
    })
}

/// Latency distribution on a logarithmic axis, with the percentiles marked.
pub(super) fn latency_distribution_plot(latency: &Histogram) -> String {
    let bins = histogram_bins(latency);
    let (Some(first), Some(last)) = (bins.first(), bins.last()) else { return String::new() };
    let slack = if last.1 < 3.0 * first.0 { 2.0 } else { 1.1 };
    let (from, to) = (first.0 / slack, last.1 * slack);
    // Logarithmic, since the tail would be invisible on a linear axis.
    let rarest = bins.iter().map(|bin| bin.2).filter(|share| *share > 0.0).fold(1.0, f64::min);
    let bottom = 10.0_f64.powf(rarest.log10().floor().max(-7.0));
    let span = 1.6 / bottom;
    let outline = || {
        let steps = bins
            .iter()
            .flat_map(|(low, high, share)| [(*low, share.max(bottom)), (*high, share.max(bottom))]);
        core::iter::once((first.0, bottom)).chain(steps).chain([(last.1, bottom)])
    };
    draw_svg(SIZE, |backend| {
        let mut chart = log_chart_frame(backend, from..to, bottom..bottom * span);
        draw_mesh(&mut chart, &|x| show_ns_f64(*x), &format_percent);
        chart.draw_series(AreaSeries::new(outline(), bottom, SOFT.colour)).ok();
        chart.draw_series(LineSeries::new(outline(), ACCENT.colour.stroke_width(2))).ok();
        for (row, (name, per_million)) in (0_u8..).zip(PERCENTILES) {
            let value = (latency.percentile(per_million) as f64).max(1.0);
            let height = bottom * span.powf(0.98 - 0.075 * f64::from(row));
            let side = if value.ln() > from.ln() + 0.85 * (to / from).ln() { -1 } else { 1 };
            draw_vertical_mark(
                &mut chart,
                &format!("{name}  {}", show_ns_f64(value)),
                (value, height),
                bottom,
                side,
            );
        }
    })
}

/// I/Os per second by number of threads, with one line for each mode of the block layer.
#[expect(clippy::cast_precision_loss, reason = "a drawing")]
pub(super) fn iops_by_threads_plot(compared: &NullBlkResult) -> String {
    let points = || compared.rows.iter().flat_map(|row| &row.points);
    let top = points().map(|point| point.iops).fold(1.0, f64::max) * 1.15;
    let last = points().map(|point| point.threads).max().unwrap_or(1) as f64;
    draw_svg(SIZE, |backend| {
        // Margin on the right for the names of the lines.
        let mut chart = chart_frame(backend, 0.5..last + (last + 1.0) * 0.3, 0.0..top);
        let whole = |x: &f64| if x.fract() == 0.0 { format!("{x:.0}") } else { String::new() };
        draw_mesh(&mut chart, &whole, &show_axis_rate);
        for (row, role) in compared.rows.iter().zip([MARK, MUTED, ACCENT, ACCENT, ACCENT]) {
            let line = || row.points.iter().map(|point| (point.threads as f64, point.iops));
            let Some(end) = line().next_back() else { continue };
            chart.draw_series(LineSeries::new(line(), role.colour.stroke_width(2))).ok();
            let dots = line().map(|at| Circle::new(at, 3, role.colour.filled()));
            chart.draw_series(dots).ok();
            let style = text_style(&INK.colour).pos(Pos::new(HPos::Left, VPos::Center));
            let label = EmptyElement::at(end) + Text::new(row.mode_text(), (8, 0), style);
            chart.draw_series([label]).ok();
        }
    })
}

/// Labels of a logarithmic axis: at 1, 2 and 5 of each power of ten, or only at the powers if there
/// are many.
fn log_axis_ticks(range: Range<f64>) -> Vec<f64> {
    let steps: &[f64] = if range.end / range.start > 2e4 { &[1.0] } else { &[1.0, 2.0, 5.0] };
    let decades = (0..=12).map(|exponent| 10.0_f64.powi(exponent));
    let all = decades.flat_map(|decade| steps.iter().map(move |step| step * decade));
    all.filter(|tick| range.contains(tick)).collect()
}

/// Vertical line up to `at`, with a label on its right (side 1) or left (side -1).
fn draw_vertical_mark(
    chart: &mut ChartContext<'_, SVGBackend<'_>, Cartesian2d<LogScaleWithTicks, LogChart>>,
    label: &str,
    at: (f64, f64),
    bottom: f64,
    side: i32,
) {
    let anchor = if side < 0 { HPos::Right } else { HPos::Left };
    let style = text_style(&INK.colour).pos(Pos::new(anchor, VPos::Top));
    let line = PathElement::new([(at.0, bottom), at], MARK.colour);
    let label = EmptyElement::at(at) + Text::new(label.to_owned(), (6 * side, -1), style);
    chart.draw_series([line]).ok();
    chart.draw_series([label]).ok();
}

/// Distributes the buckets of a histogram over bins of equal width on a logarithmic axis. Each bin
/// has its bounds and its fraction of all values.
#[expect(clippy::cast_precision_loss, reason = "a drawing")]
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a few hundred bins")]
fn histogram_bins(latency: &Histogram) -> Vec<(f64, f64, f64)> {
    let total = latency.count() as f64;
    let place = |value: f64| value.max(1.0).log2() * BINS_PER_OCTAVE;
    let buckets: Vec<(f64, f64, u64)> = latency
        .buckets()
        .map(|(last, count)| {
            // The width of a bucket is a 64th of its power of two.
            let width = 1_u64 << last.max(1).ilog2().saturating_sub(6);
            (place((last + 1 - width) as f64), place((last + 1) as f64), count)
        })
        .collect();
    let Some(first) = buckets.first().map(|bucket| bucket.0.floor()) else { return Vec::new() };
    let end = buckets.last().map_or(first, |bucket| bucket.1.ceil());
    let mut shares = vec![0.0; ((end - first) as usize).max(1)];
    for (low, high, count) in buckets {
        let width = (high - low).max(1e-9);
        let (from, to) = ((low - first) as usize, (high - first).ceil() as usize);
        for (bin, share) in shares.iter_mut().enumerate().take(to).skip(from) {
            let edge = first + bin as f64;
            let inside = (high.min(edge + 1.0) - low.max(edge)).max(0.0);
            *share += count as f64 / total * inside / width;
        }
    }
    let edge = |bin: usize| ((first + bin as f64) / BINS_PER_OCTAVE).exp2();
    let bins = shares.into_iter().enumerate();
    bins.map(|(bin, share)| (edge(bin), edge(bin + 1), share)).collect()
}

type LinearChart = plotters::coord::types::RangedCoordf64;
type LogChart = plotters::coord::combinators::LogCoord<f64>;
type LogScaleWithTicks = plotters::coord::combinators::WithKeyPoints<LogChart>;

fn chart_frame<'a>(
    backend: SVGBackend<'a>,
    x: Range<f64>,
    y: Range<f64>,
) -> ChartContext<'a, SVGBackend<'a>, Cartesian2d<LinearChart, LinearChart>> {
    chart_builder(&backend.into_drawing_area())
        .build_cartesian_2d(x, y)
        .expect("a string takes every drawing")
}

fn log_chart_frame<'a>(
    backend: SVGBackend<'a>,
    x: Range<f64>,
    y: Range<f64>,
) -> ChartContext<'a, SVGBackend<'a>, Cartesian2d<LogScaleWithTicks, LogChart>> {
    chart_builder(&backend.into_drawing_area())
        .build_cartesian_2d(x.clone().log_scale().with_key_points(log_axis_ticks(x)), y.log_scale())
        .expect("a string takes every drawing")
}

fn chart_builder<'a, 'b>(
    area: &'a plotters::drawing::DrawingArea<SVGBackend<'b>, plotters::coord::Shift>,
) -> ChartBuilder<'a, 'static, SVGBackend<'b>> {
    let mut builder = ChartBuilder::on(area);
    builder.margin(6).margin_right(24).x_label_area_size(28).y_label_area_size(64);
    builder
}

fn draw_mesh<DB, X, Y>(
    chart: &mut ChartContext<'_, DB, Cartesian2d<X, Y>>,
    show_x: &dyn Fn(&f64) -> String,
    show_y: &dyn Fn(&f64) -> String,
) where
    DB: DrawingBackend,
    X: Ranged<ValueType = f64> + ValueFormatter<f64>,
    Y: Ranged<ValueType = f64> + ValueFormatter<f64>,
{
    let mut mesh = chart.configure_mesh();
    mesh.disable_x_mesh()
        .light_line_style(plotters::style::TRANSPARENT)
        .bold_line_style(GRID.colour)
        .axis_style(GRID.colour)
        .label_style(text_style(&MUTED.colour))
        .x_labels(16)
        .y_labels(6)
        .x_label_formatter(&show_x)
        .y_label_formatter(&show_y);
    mesh.draw().ok();
}

fn text_style(colour: &'static RGBColor) -> TextStyle<'static> {
    TextStyle::from((FONT, FONT_SIZE).into_font()).color(colour)
}

fn show_axis_rate(rate: &f64) -> String {
    let (number, prefix) = scale_to_prefix(*rate);
    format!("{} {prefix}", number.trim_end_matches(".0"))
}

fn format_percent(share: &f64) -> String {
    let percent = share * 100.0;
    let decimals = (0..5).take_while(|place| percent * 10.0_f64.powi(*place) < 0.99).count();
    format!("{percent:.decimals$} %")
}

/// Draws into a string and replaces the colors by CSS variables.
fn draw_svg(size: (u32, u32), picture: impl FnOnce(SVGBackend<'_>)) -> String {
    let mut svg = String::new();
    picture(SVGBackend::with_string(&mut svg, size));
    for role in ROLES {
        for paint in ["fill", "stroke"] {
            let style = format!("style=\"{paint}:{}\"", role.style);
            svg = svg.replace(&format!("{paint}=\"{}\"", role.hex), &style);
        }
    }
    svg
}
