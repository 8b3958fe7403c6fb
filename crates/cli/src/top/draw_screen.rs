//! Rendering of the state into terminal cells. Nothing is drawn outside the terminal, whatever its
//! size.

use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::{Color, Modifier, Style};

use super::app_state::{AppState, ConnectionStage, ScreenTable};
use super::format::escape;
use super::header::header_lines;
use super::key_bindings::KEYS;
use super::screen_tables::{process_table, screen_table};
use super::table_grid::{
    ColumnWidth, GAP, GridCell, GridColumn, TableGrid, TextTone, clip_text, pad_text,
    percentage_bar, sparkline, text_width,
};

/// Style of the screen.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ScreenTheme {
    /// Whether colors may be used. Bold, dim and reversed are not colors.
    pub(crate) is_coloured: bool,
}

/// Draws the screen.
pub(crate) fn draw_screen(state: &AppState, theme: ScreenTheme, buffer: &mut Buffer) {
    let mut area = buffer.area;
    for (text, style) in header_lines(state, area.width, theme) {
        draw_line(buffer, split_top_line(&mut area), &text, style);
    }
    if area.height > 2 {
        let foot = split_bottom_line(&mut area);
        draw_line(buffer, foot, &key_help_line(state), theme.dim_style());
    }
    match &state.stage {
        _ if state.is_help => draw_help(buffer, area),
        ConnectionStage::Choosing(running) => {
            let title = "Choose a process with the arrows and enter.";
            draw_line(buffer, split_top_line(&mut area), title, Style::new());
            TableDrawing {
                grid: process_table(running),
                chosen: Some(state.chosen.process),
                has_focus: true,
            }
            .draw_table(buffer, area, theme);
        }
        ConnectionStage::Looking => {
            let text = "This waits for a tenmil process to start; q quits, l lists those that run.";
            draw_line(buffer, split_top_line(&mut area), text, Style::new());
        }
        _ => draw_tables_and_events(buffer, area, state, theme),
    }
}

/// Draws the tables, and the last events below them.
fn draw_tables_and_events(
    buffer: &mut Buffer,
    mut area: Rect,
    state: &AppState,
    theme: ScreenTheme,
) {
    if area.height > 5 {
        let event = split_bottom_line(&mut area);
        draw_line(buffer, event, &last_event_text(state), theme.dim_style());
    }
    if state.io_page.is_shown {
        let grid = screen_table(state, ScreenTable::Io);
        let chosen = state.io_page.chosen.min(grid.rows.len().saturating_sub(1));
        TableDrawing { grid, chosen: Some(chosen), has_focus: true }
            .draw_table(buffer, area, theme);
        return;
    }
    if state.shown.as_ref().is_some_and(|shown| shown.sample.reactors.is_empty()) {
        draw_line(
            buffer,
            split_top_line(&mut area),
            "The process runs no reactors now.",
            Style::new(),
        );
        return;
    }
    let grids = ScreenTable::ALL.map(|which| screen_table(state, which));
    let wanted = grids.each_ref().map(|grid| table_height(grid));
    let focus = ScreenTable::ALL.iter().position(|which| *which == state.focus).unwrap_or(0);
    let shares = distribute_lines(area.height, wanted, focus);
    for (index, (which, grid)) in ScreenTable::ALL.into_iter().zip(grids).enumerate() {
        let place = Rect { height: shares[index].min(area.height), ..area };
        area.y += place.height;
        area.height -= place.height;
        let drawing = TableDrawing {
            grid,
            chosen: selected_row(state, which),
            has_focus: which == state.focus,
        };
        drawing.draw_table(buffer, place, theme);
    }
}

/// Lines of a table: a heading, one per row or a note that there are none, and a separator.
fn table_height(grid: &TableGrid<'_>) -> u16 {
    u16::try_from(grid.rows.len().max(1)).unwrap_or(u16::MAX).saturating_add(2)
}

/// Distributes the lines over the tables. If there are too few for all three, the focused table gets
/// the rest.
fn distribute_lines(height: u16, wanted: [u16; 3], focus: usize) -> [u16; 3] {
    const LEAST: u16 = 3;
    let mut shares = [0; 3];
    if height < 3 * LEAST {
        shares[focus] = height;
        return shares;
    }
    let even = height / 3;
    shares = wanted.map(|wanted| wanted.min(even));
    let mut left = height - shares.iter().sum::<u16>();
    for index in [focus, 0, 1, 2] {
        let more = (wanted[index] - shares[index]).min(left);
        shares[index] += more;
        left -= more;
    }
    shares
}

fn selected_row(state: &AppState, which: ScreenTable) -> Option<usize> {
    let sample = &state.shown.as_ref()?.sample;
    match which {
        ScreenTable::Reactors => {
            let id = state.selected_reactor()?;
            state.reactor_rows().iter().position(|at| sample.reactors[*at].id == id)
        }
        ScreenTable::Threads => {
            let id = state.selected_thread()?;
            state.thread_rows().iter().position(|at| sample.threads[*at].id == id)
        }
        ScreenTable::Pollers => {
            let last = state.poller_rows().len().checked_sub(1)?;
            Some(state.chosen.poller.min(last))
        }
        ScreenTable::Io => Some(state.io_page.chosen),
    }
}

/// Table on the screen.
struct TableDrawing<'a> {
    grid: TableGrid<'a>,
    /// Selected row.
    chosen: Option<usize>,
    has_focus: bool,
}

impl TableDrawing<'_> {
    fn draw_table(&self, buffer: &mut Buffer, mut area: Rect, theme: ScreenTheme) {
        let fitted = self.grid.fitting_columns(area.width);
        let head = split_top_line(&mut area);
        let style = theme.heading_style(self.has_focus);
        draw_line(buffer, head, &" ".repeat(head.width.into()), style);
        for (place, column) in column_areas(head, &fitted, self.grid.columns) {
            draw_line(buffer, place, &pad_text(column.1.head, place.width, column.1.width), style);
        }
        if self.grid.rows.is_empty() {
            draw_line(buffer, split_top_line(&mut area), "none", theme.dim_style());
        }
        for index in self.visible_rows(area.height) {
            let place = split_top_line(&mut area);
            let is_chosen = self.chosen == Some(index);
            for (place, (at, column)) in column_areas(place, &fitted, self.grid.columns) {
                let cell = self.grid.rows[index].get(at).unwrap_or(&GridCell::Empty);
                let (text, style) = cell_text(cell, place.width, column.width, theme);
                draw_line(buffer, place, &text, style);
            }
            if is_chosen {
                buffer.set_style(place, theme.selection_style(self.has_focus));
            }
        }
    }

    /// The rows that fit, around the selected one.
    fn visible_rows(&self, height: u16) -> std::ops::Range<usize> {
        let (count, room) = (self.grid.rows.len(), usize::from(height));
        let middle = self.chosen.unwrap_or(0).saturating_sub(room / 2);
        let first = middle.min(count.saturating_sub(room));
        first..count.min(first + room)
    }
}

/// Areas of the columns in a line.
fn column_areas<'a>(
    line: Rect,
    fitted: &'a [(usize, u16)],
    columns: &'static [GridColumn],
) -> impl Iterator<Item = (Rect, (usize, &'static GridColumn))> + 'a {
    let mut begin = line.x;
    fitted.iter().map(move |(at, width)| {
        let place = Rect { x: begin.min(line.right()), width: *width, ..line }.intersection(line);
        begin = begin.saturating_add(*width).saturating_add(GAP);
        (place, (*at, &columns[*at]))
    })
}

fn cell_text(
    cell: &GridCell<'_>,
    room: u16,
    width: ColumnWidth,
    theme: ScreenTheme,
) -> (String, Style) {
    match cell {
        GridCell::Text(text, tone) => (pad_text(text, room, width), theme.tone_style(*tone)),
        GridCell::Bar(percent) => (percentage_bar(*percent, room), theme.busy_style(*percent)),
        GridCell::History(minute) => (sparkline(&minute.busy_by_interval(room)), theme.bar_style()),
        GridCell::Empty => (String::new(), Style::new()),
    }
}

fn last_event_text(state: &AppState) -> String {
    match state.happened.back() {
        Some(last) => format!("last event: {}: {}", escape(&last.kind), escape(&last.text)),
        None => "no event yet".into(),
    }
}

fn key_help_line(state: &AppState) -> String {
    if state.is_help {
        return "esc back  q quit".into();
    }
    if matches!(state.stage, ConnectionStage::Choosing(_)) {
        return "q quit  ? help  enter watch".into();
    }
    let (table, sort) = (state.active_table(), state.current_sort(state.active_table()).name());
    let (title, grouping) = (table.title(), state.io_page.grouping.name());
    match table {
        ScreenTable::Io => format!(
            "q quit  ? help  i reactors  tab by {grouping}  s sort (by {sort})  p pause  l list"
        ),
        _ => format!(
            "q quit  ? help  i I/O  tab next table  s sort ({title} by {sort})  p pause  l list"
        ),
    }
}

fn draw_help(buffer: &mut Buffer, mut area: Rect) {
    let room = KEYS.iter().map(|(key, _)| text_width(key)).max().unwrap_or(0);
    for (key, does) in KEYS {
        let text = format!("{}  {does}", pad_text(key, room, ColumnWidth::Word));
        draw_line(buffer, split_top_line(&mut area), &text, Style::new());
    }
    let notes = [
        "",
        "busy %    part of the time in iterations (of a thread: in pollers and messages) that found work",
        "found %   part of the polls that found work",
        "stalled   awake, and no iteration has ended since the sample before",
        "too long  iterations that took longer than they may; `longest` and `in` show the longest",
    ];
    for note in notes {
        draw_line(buffer, split_top_line(&mut area), note, Style::new());
    }
}

/// Writes a text into an area, clipped to it.
fn draw_line(buffer: &mut Buffer, place: Rect, text: &str, style: Style) {
    let place = place.intersection(buffer.area);
    if !place.is_empty() {
        let text = clip_text(text, place.width);
        buffer.set_stringn(place.x, place.y, text, place.width.into(), style);
    }
}

/// Splits a line off the top of an area.
fn split_top_line(area: &mut Rect) -> Rect {
    let line = Rect { height: area.height.min(1), ..*area };
    area.y += line.height;
    area.height -= line.height;
    line
}

/// Splits a line off the bottom of an area.
fn split_bottom_line(area: &mut Rect) -> Rect {
    area.height = area.height.saturating_sub(1);
    Rect { y: area.bottom(), height: 1, ..*area }
}

impl ScreenTheme {
    pub(crate) fn busy_style(self, percent: f64) -> Style {
        let colour = match percent {
            90.0.. => Color::Red,
            60.0.. => Color::Yellow,
            _ => Color::Green,
        };
        self.color_style(colour)
    }

    pub(crate) fn alarm_style(self) -> Style {
        self.color_style(Color::Red).add_modifier(Modifier::BOLD)
    }

    pub(crate) fn dim_style(self) -> Style {
        Style::new().add_modifier(Modifier::DIM)
    }

    fn bar_style(self) -> Style {
        self.color_style(Color::Cyan)
    }

    fn heading_style(self, has_focus: bool) -> Style {
        let style = Style::new().add_modifier(Modifier::BOLD);
        if has_focus { style.add_modifier(Modifier::UNDERLINED) } else { style }
    }

    fn selection_style(self, has_focus: bool) -> Style {
        let modifier = if has_focus { Modifier::REVERSED } else { Modifier::BOLD };
        Style::new().add_modifier(modifier)
    }

    fn tone_style(self, tone: TextTone) -> Style {
        match tone {
            TextTone::Normal => Style::new(),
            TextTone::Quiet => self.dim_style(),
            TextTone::Share(percent) => self.busy_style(percent.into()),
            TextTone::Alarm => self.alarm_style(),
        }
    }

    fn color_style(self, colour: Color) -> Style {
        if self.is_coloured { Style::new().fg(colour) } else { Style::new() }
    }
}

#[cfg(test)]
mod tests;
