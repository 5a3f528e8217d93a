/* SPDX-License-Identifier: Apache-2.0
 *
 * Draws the figure of check-never-slower as an SVG file.
 */
#include "never_slower_draw.h"

#include <math.h>
#include <stdio.h>

#define WIDTH  760.0
#define HEIGHT 440.0
#define LEFT   60.0
#define TOP    40.0
#define PLOT_W (WIDTH - LEFT - 20)
#define PLOT_H (HEIGHT - TOP - 90)
#define MAX_Y  1.4
#define MAX_X  3.3 /* log10 of MB/s; the left edge is 1 MB/s */
#define STEPS  200

static double at_x(double mb_per_s) {
    double x = mb_per_s > 0 ? log10(mb_per_s) : MAX_X;
    return LEFT + (x < MAX_X ? x : MAX_X) / MAX_X * PLOT_W;
}

static double at_y(double part) {
    return TOP + PLOT_H - (part < MAX_Y ? part : MAX_Y) / MAX_Y * PLOT_H;
}

static void draw_axes(FILE *f) {
    fprintf(f,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %.0f %.0f\" font-family=\"sans-serif\" "
            "font-size=\"13\">\n<rect width=\"100%%\" height=\"100%%\" fill=\"#fff\"/>\n",
            WIDTH, HEIGHT);
    for (int i = 0; i <= 7; i++) {
        double y = at_y(0.2 * i);
        fprintf(f,
                "<path d=\"M%.1f %.1fH%.1f\" stroke=\"#ddd\"/>"
                "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"end\">%.1f</text>\n",
                LEFT, y, LEFT + PLOT_W, LEFT - 8, y + 4, 0.2 * i);
    }
    for (int i = 0; i <= 3; i++) {
        double x = at_x(pow(10, i));
        fprintf(f,
                "<path d=\"M%.1f %.1fV%.1f\" stroke=\"#ddd\"/>"
                "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"middle\">%g MB/s</text>\n",
                x, TOP, TOP + PLOT_H, x, TOP + PLOT_H + 20, pow(10, i));
    }
    fprintf(f, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"end\">unlimited</text>\n", LEFT + PLOT_W, TOP + PLOT_H + 36);
    fprintf(f,
            "<text x=\"%.1f\" y=\"22\" font-weight=\"bold\">"
            "Time to the first token, as a part of that without a store</text>\n",
            LEFT);
}

/* ---- what follows from the two rates alone; 1 = computing alone ---- */

static double loading_alone(double rate, double crossover) {
    return crossover / rate;
}

/* Both at once, neither in the other's way, met exactly. */
static double ideal(double rate, double crossover) {
    return crossover / (rate + crossover);
}

static void draw_curve(FILE *f, double (*part_of)(double, double), double crossover, const char *style) {
    fprintf(f, "<path d=\"");
    char to = 'M';
    for (int i = 0; i <= STEPS; i++) {
        double rate = pow(10, MAX_X * i / STEPS), part = part_of(rate, crossover);
        if (part <= MAX_Y) {
            fprintf(f, "%c%.1f %.1f", to, at_x(rate), at_y(part));
            to = 'L';
        }
    }
    fprintf(f, "\" fill=\"none\" stroke-width=\"2\" %s/>\n", style);
}

/* ---- what was measured ---- */

static void draw_measured(FILE *f, const spot *spots, size_t num, bool fresh, const char *color) {
    fprintf(f, "<path d=\"");
    for (size_t i = 0; i < num; i++) {
        fprintf(f, "%c%.1f %.1f", i == 0 ? 'M' : 'L', at_x(spots[i].mb_per_s),
                at_y(fresh ? spots[i].fresh : spots[i].known));
    }
    fprintf(f, "\" fill=\"none\" stroke=\"%s\" stroke-width=\"%d\"/>\n", color, fresh ? 1 : 3);
    for (size_t i = 0; i < num; i++) {
        double part = fresh ? spots[i].fresh : spots[i].known;
        fprintf(f, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"%d\" fill=\"%s\"><title>%.1f MB/s: %.3f</title></circle>\n",
                at_x(spots[i].mb_per_s), at_y(part), fresh ? 3 : 4, color, spots[i].mb_per_s, part);
    }
}

static void draw_loading(FILE *f, const spot *spots, size_t num) {
    for (size_t i = 0; i < num; i++) {
        if (spots[i].loading > 0) {
            fprintf(f,
                    "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"4\" fill=\"#c60\"><title>%.1f MB/s: %.3f</title></circle>\n",
                    at_x(spots[i].mb_per_s), at_y(spots[i].loading), spots[i].mb_per_s, spots[i].loading);
        }
    }
}

static void draw_legend(FILE *f) {
    static const struct {
        const char *style, *text;
        double x, y;
    } entries[] = {
        {"stroke=\"#06c\" stroke-width=\"3\"", "kvferry", 0, 0},
        {"stroke=\"#39f\" stroke-width=\"1\"", "kvferry, its first prompt", 0, 1},
        {"stroke=\"#888\" stroke-width=\"2\"", "computing alone", 210, 0},
        {"stroke=\"#c60\" stroke-width=\"2\" stroke-dasharray=\"6 4\"", "loading alone (dots: measured)", 210, 1},
        {"stroke=\"#5a5\" stroke-width=\"2\" stroke-dasharray=\"2 3\"", "ideal: both, each at its full rate", 450, 0},
    };
    for (size_t i = 0; i < sizeof entries / sizeof *entries; i++) {
        double x = LEFT + entries[i].x, y = HEIGHT - 36 + 20 * entries[i].y;
        fprintf(f, "<path d=\"M%.0f %.0fh24\" %s/><text x=\"%.0f\" y=\"%.0f\">%s</text>\n", x, y - 4, entries[i].style,
                x + 30, y, entries[i].text);
    }
}

bool draw_never_slower(const char *path, const spot *spots, size_t num, double crossover) {
    FILE *f = fopen(path, "w");
    if (f == NULL) {
        fprintf(stderr, "%s can't be written\n", path);
        return false;
    }
    draw_axes(f);
    fprintf(f, "<path d=\"M%.1f %.1fH%.1f\" stroke=\"#888\" stroke-width=\"2\"/>\n", LEFT, at_y(1), LEFT + PLOT_W);
    draw_curve(f, loading_alone, crossover, "stroke=\"#c60\" stroke-dasharray=\"6 4\"");
    draw_curve(f, ideal, crossover, "stroke=\"#5a5\" stroke-dasharray=\"2 3\"");
    draw_loading(f, spots, num);
    draw_measured(f, spots, num, true, "#39f");
    draw_measured(f, spots, num, false, "#06c");
    draw_legend(f);
    fprintf(f, "</svg>\n");
    return fclose(f) == 0;
}
