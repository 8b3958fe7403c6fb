//! Plot of interleaved trials: one row per variant, with a dot for each round and a bar at the
//! median.

use plotters::prelude::{Circle, Color, EmptyElement, IntoDrawingArea, PathElement, Text};
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::{ACCENT, INK, MARK, SIZE, chart_builder, draw_mesh, draw_svg, text_style};

/// Row: label and values.
pub struct PlotRow<'a> {
    /// Label.
    pub label: &'a str,
    /// Value of each round.
    pub values: Vec<f64>,
}

/// Height of a row in pixels.
const ROW_HEIGHT: u32 = 34;
/// Height of the margins above and below in pixels.
const EDGES: u32 = 46;

/// Draws the rows from top to bottom, on a common axis that begins at zero.
#[expect(clippy::cast_precision_loss, reason = "a drawing")]
pub fn rounds_plot(rows: &[PlotRow<'_>], show: &dyn Fn(&f64) -> String) -> String {
    let most = rows.iter().flat_map(|row| row.values.iter().copied()).fold(0.0, f64::max);
    if rows.is_empty() || most <= 0.0 {
        return String::new();
    }
    let height = EDGES + ROW_HEIGHT * u32::try_from(rows.len()).unwrap_or(0);
    draw_svg((SIZE.0, height), |backend| {
        let area = backend.into_drawing_area();
        let mut builder = chart_builder(&area);
        let bottom = rows.len() as f64;
        let chart = builder.y_label_area_size(0).build_cartesian_2d(0.0..most * 1.08, bottom..0.0);
        let mut chart = chart.expect("a string takes every drawing");
        draw_mesh(&mut chart, show, &|_| String::new());
        for (index, row) in rows.iter().enumerate() {
            let (top, middle) = (index as f64, index as f64 + 0.66);
            let style = text_style(&INK.colour).pos(Pos::new(HPos::Left, VPos::Top));
            let label =
                EmptyElement::at((0.0, top)) + Text::new(row.label.to_owned(), (6, 2), style);
            chart.draw_series([label]).ok();
            let dots =
                row.values.iter().map(|x| Circle::new((*x, middle), 4, ACCENT.colour.filled()));
            chart.draw_series(dots).ok();
            let mut sorted = row.values.clone();
            sorted.sort_unstable_by(f64::total_cmp);
            if let Some(median) = sorted.get(sorted.len().saturating_sub(1) / 2) {
                let bar = [(*median, middle - 0.3), (*median, middle + 0.3)];
                chart.draw_series([PathElement::new(bar, MARK.colour.stroke_width(3))]).ok();
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::{PlotRow, rounds_plot};

    #[test]
    fn every_round_has_a_dot_and_every_row_its_name_and_median() {
        let rows = [
            PlotRow { label: "one side", values: vec![1.0, 2.0, 3.0] },
            PlotRow { label: "the <other>", values: vec![4.0, 2.0] },
        ];
        let drawing = rounds_plot(&rows, &|value| format!("{value:.1} x"));
        assert_eq!(drawing.matches("<circle").count(), 5);
        assert_eq!(drawing.matches("stroke:var(--mark)").count(), 2);
        assert!(drawing.contains("one side") && drawing.contains("the &lt;other&gt;"));
        assert!(drawing.contains("1.0 x"), "the axis is labelled");
    }

    #[test]
    fn empty_input_draws_nothing() {
        assert_eq!(rounds_plot(&[], &f64::to_string), "");
        let row = PlotRow { label: "none", values: vec![0.0] };
        assert_eq!(rounds_plot(&[row], &f64::to_string), "");
    }
}
