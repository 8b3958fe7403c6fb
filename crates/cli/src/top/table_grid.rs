//! Table layout: which columns fit, their widths, and the text of the cells.

use ratatui::text::Span;

use super::busy_history::BusyHistory;

/// Column of a table.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GridColumn {
    pub(crate) head: &'static str,
    pub(crate) width: ColumnWidth,
    /// Columns of the highest rank are dropped first if the space is too narrow; rank 0 is never
    /// dropped.
    pub(crate) rank: u8,
}

/// Width and alignment of a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ColumnWidth {
    /// As wide as its content, right-aligned.
    Number,
    /// As wide as its content.
    Word,
    /// As wide as its content, but at most this wide if space is short.
    Name(u16),
    /// Minimum and maximum width; takes the space that is left.
    Picture(u16, u16),
}

/// Content of a cell.
#[derive(Clone, Debug)]
pub(crate) enum GridCell<'a> {
    /// A text.
    Text(String, TextTone),
    /// A percentage, as a bar.
    Bar(f64),
    /// The busy share of the last minute, as a line of bars.
    History(&'a BusyHistory),
    /// Nothing.
    Empty,
}

/// Emphasis of a text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum TextTone {
    /// Default.
    #[default]
    Normal,
    /// Of little importance.
    Quiet,
    /// A load of this many percent.
    Share(u8),
    /// A problem.
    Alarm,
}

/// Table with its columns and rows.
#[derive(Clone, Debug)]
pub(crate) struct TableGrid<'a> {
    pub(crate) columns: &'static [GridColumn],
    pub(crate) rows: Vec<Vec<GridCell<'a>>>,
}

/// Gap between two columns.
pub(crate) const GAP: u16 = 2;

impl TableGrid<'_> {
    /// The columns that fit, with their widths.
    pub(crate) fn fitting_columns(&self, room: u16) -> Vec<(usize, u16)> {
        let natural: Vec<u16> =
            (0..self.columns.len()).map(|column| self.natural_width(column)).collect();
        let least = |column: usize| match self.columns[column].width {
            ColumnWidth::Name(least) => natural[column].min(least),
            ColumnWidth::Picture(least, _) => least,
            ColumnWidth::Number | ColumnWidth::Word => natural[column],
        };
        let mut kept: Vec<(usize, u16)> =
            (0..self.columns.len()).map(|column| (column, least(column))).collect();
        // Drops the column of the highest rank; among equal ranks, the rightmost.
        while total_width(&kept) > room.into() && kept.len() > 1 {
            let mut ranks = kept.iter().enumerate().map(|(at, it)| (self.columns[it.0].rank, at));
            match ranks.by_ref().max() {
                Some((1.., at)) => drop(kept.remove(at)),
                _ => break,
            }
        }
        let most = |column: usize, is_picture: bool| match self.columns[column].width {
            ColumnWidth::Picture(_, most) if is_picture => most,
            ColumnWidth::Name(_) if !is_picture => natural[column],
            _ => 0,
        };
        // Names take the free space before bars do.
        for is_picture in [false, true] {
            widen_columns(&mut kept, room, |column| most(column, is_picture));
        }
        kept
    }

    /// Width of the widest cell of a column.
    fn natural_width(&self, column: usize) -> u16 {
        let cells = self.rows.iter().filter_map(|row| match row.get(column) {
            Some(GridCell::Text(text, _)) => Some(text_width(text)),
            _ => None,
        });
        cells.chain([text_width(self.columns[column].head)]).max().unwrap_or(0)
    }

    /// The table as lines of text in full width, without bars.
    pub(crate) fn text_lines(&self) -> String {
        let natural: Vec<u16> =
            (0..self.columns.len()).map(|column| self.natural_width(column)).collect();
        let line = |text: &dyn Fn(usize) -> String| {
            let columns = self.columns.iter().enumerate();
            let texts = columns.filter(|(_, it)| !matches!(it.width, ColumnWidth::Picture(..)));
            let padded = texts.map(|(at, it)| pad_text(&text(at), natural[at], it.width));
            let cells: Vec<String> = padded.collect();
            cells.join("  ").trim_end().to_owned() + "\n"
        };
        let head = line(&|at| self.columns[at].head.to_owned());
        let row = |row: &Vec<GridCell<'_>>| {
            line(&|at| match row.get(at) {
                Some(GridCell::Text(text, _)) => text.clone(),
                _ => String::new(),
            })
        };
        head + &self.rows.iter().map(row).collect::<String>()
    }
}

/// Distributes the remaining space, cell by cell, over the columns that may grow.
fn widen_columns(kept: &mut [(usize, u16)], room: u16, most: impl Fn(usize) -> u16) {
    let mut left = u32::from(room).saturating_sub(total_width(kept));
    let mut is_any = true;
    while left > 0 && is_any {
        is_any = false;
        for (column, width) in kept.iter_mut() {
            if left > 0 && *width < most(*column) {
                (*width, left, is_any) = (*width + 1, left - 1, true);
            }
        }
    }
}

fn total_width(kept: &[(usize, u16)]) -> u32 {
    let gaps = kept.len().saturating_sub(1);
    kept.iter().map(|(_, width)| u32::from(*width)).sum::<u32>()
        + u32::try_from(gaps).unwrap_or(u32::MAX).saturating_mul(GAP.into())
}

/// Pads or clips a text to `width` cells; a clipped text ends in an ellipsis.
pub(crate) fn pad_text(text: &str, room: u16, width_of: ColumnWidth) -> String {
    let text = clip_text(text, room);
    let space = " ".repeat((room - text_width(&text).min(room)).into());
    if width_of == ColumnWidth::Number { space + &text } else { text + &space }
}

/// Clips a text to at most this many cells.
pub(crate) fn clip_text(text: &str, room: u16) -> String {
    if text_width(text) <= room {
        return text.to_owned();
    }
    let mut clipped = String::new();
    let mut used = 0;
    for character in text.chars() {
        let more = text_width(character.encode_utf8(&mut [0; 4]));
        if used + more >= room {
            break;
        }
        used += more;
        clipped.push(character);
    }
    if room > 0 {
        clipped.push('…');
    }
    clipped
}

/// Number of terminal cells of a text.
pub(crate) fn text_width(text: &str) -> u16 {
    u16::try_from(Span::raw(text).width()).unwrap_or(u16::MAX)
}

/// A percentage as a bar of this many cells, with a resolution of an eighth of a cell.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "at most eight a cell")]
pub(crate) fn percentage_bar(percent: f64, room: u16) -> String {
    const PARTS: [char; 8] = [' ', '▏', '▎', '▍', '▌', '▋', '▊', '▉'];
    let eighths = (percent.clamp(0.0, 100.0) / 100.0 * f64::from(room) * 8.0).round() as usize;
    let full = eighths / 8;
    let mut bar = "█".repeat(full);
    if full < room.into() {
        bar.push(PARTS[eighths % 8]);
    }
    bar.extend(std::iter::repeat_n(' ', usize::from(room).saturating_sub(full + 1)));
    bar
}

/// Percentages as a line of bars. Idle is a bar of minimum height, unknown is blank.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "at most seven")]
pub(crate) fn sparkline(pieces: &[Option<f64>]) -> String {
    const LEVELS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let level = |percent: f64| LEVELS[(percent.clamp(0.0, 100.0) / 100.0 * 7.0).round() as usize];
    pieces.iter().map(|piece| piece.map_or(' ', level)).collect()
}

#[cfg(test)]
mod tests {
    use super::{
        ColumnWidth, GAP, GridCell, GridColumn, TableGrid, TextTone, clip_text, pad_text,
        percentage_bar, sparkline, text_width,
    };

    const COLUMNS: &[GridColumn] = &[
        GridColumn { head: "name", width: ColumnWidth::Name(4), rank: 0 },
        GridColumn { head: "busy", width: ColumnWidth::Number, rank: 1 },
        GridColumn { head: "", width: ColumnWidth::Picture(3, 8), rank: 2 },
        GridColumn { head: "note", width: ColumnWidth::Word, rank: 3 },
    ];

    fn test_grid() -> TableGrid<'static> {
        let text = |text: &str| GridCell::Text(text.into(), TextTone::Normal);
        let row = |name, busy| vec![text(name), text(busy), GridCell::Bar(50.0), text("-")];
        TableGrid { columns: COLUMNS, rows: vec![row("a long name", "7"), row("b", "100")] }
    }

    #[test]
    fn columns_are_dropped_by_rank_and_spare_width_goes_to_names_and_bars() {
        assert_eq!(test_grid().fitting_columns(200), [(0, 11), (1, 4), (2, 8), (3, 4)]);
        assert_eq!(test_grid().fitting_columns(28), [(0, 11), (1, 4), (2, 3), (3, 4)]);
        assert_eq!(test_grid().fitting_columns(26), [(0, 9), (1, 4), (2, 3), (3, 4)]);
        assert_eq!(test_grid().fitting_columns(20), [(0, 9), (1, 4), (2, 3)]);
        assert_eq!(test_grid().fitting_columns(10), [(0, 4), (1, 4)]);
        assert_eq!(test_grid().fitting_columns(3), [(0, 4)], "the first stays, and is clipped");
        for room in 10..100 {
            let used: u16 =
                test_grid().fitting_columns(room).iter().map(|(_, width)| width + GAP).sum();
            assert!(used - GAP <= room);
        }
    }

    #[test]
    fn text_lines_contain_everything_except_bars() {
        let expected = "\
name         busy  note
a long name     7  -
b             100  -
";
        assert_eq!(test_grid().text_lines(), expected);
    }

    #[test]
    fn text_never_exceeds_its_width() {
        assert_eq!(clip_text("abcdef", 6), "abcdef");
        assert_eq!(clip_text("abcdef", 5), "abcd…");
        assert_eq!(clip_text("一二三", 4), "一…");
        assert_eq!(clip_text("abc", 0), "");
        assert_eq!(pad_text("7", 3, ColumnWidth::Number), "  7");
        for room in 0..9 {
            assert_eq!(text_width(&pad_text("一a二b三", room, ColumnWidth::Word)), room);
        }
    }

    #[test]
    fn bar_length_matches_its_percentage() {
        assert_eq!(percentage_bar(0.0, 4), "    ");
        assert_eq!(percentage_bar(50.0, 4), "██  ");
        assert_eq!(percentage_bar(60.0, 4), "██▍ ");
        assert_eq!(percentage_bar(100.0, 4), "████");
        assert_eq!(
            [percentage_bar(900.0, 2), percentage_bar(f64::NAN, 2), percentage_bar(10.0, 0)],
            ["██", "  ", ""]
        );
    }

    #[test]
    fn sparkline_distinguishes_idle_from_unknown() {
        assert_eq!(sparkline(&[None, Some(0.0), Some(50.0), Some(100.0)]), " ▁▅█");
    }
}
